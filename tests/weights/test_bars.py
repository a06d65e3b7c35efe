"""Progress bars: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from accelerate_megatron.weights.bars import progress_bar


class Screen(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "shown", "text"),
    [(True, True, "saving weights: 100%"), (True, False, ""), (False, True, "")],
    ids=["terminal", "another-rank", "file"],
)
def test_a_bar_is_drawn_on_the_terminal_of_one_rank(
    terminal: bool, shown: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", screen)

    items = list(progress_bar([1, 2, 3], "saving weights", shown=shown))

    assert items == [1, 2, 3]
    assert text in screen.getvalue()
    assert bool(text) == bool(screen.getvalue())
