"""What the watchdog looks at: whatever a rank may wait in for the others."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore

from accelerate_megatron.faults.watchdog import Watchdog
from tests.checkpoint.training import Run, make
from tests.helpers.ranks import run_ranks


def _watched_during(name: str, is_update: bool) -> list[str | None]:
    """Return what the watchdog was told at each call of a method of the session."""
    _, model, _, loader, _ = make(Run(plugin={"return_logits": True}))
    session = model.session
    doing: list[str | None] = [None]
    seen: list[str | None] = []
    real = getattr(session, name)

    @contextmanager
    def watch(what: str) -> Iterator[None]:
        doing[0] = what
        yield
        doing[0] = None

    def noting(*args: Any) -> Any:
        seen.append(doing[0])
        return real(*args)

    session.watch = watch
    setattr(session, name, noting)
    model.train(is_update)
    model(**next(iter(loader)))
    return seen


@pytest.mark.parametrize(
    ("name", "is_update"), [("update", True), ("evaluate", False), ("take_logits", True)]
)
def test_a_step_is_watched_until_it_returns(name: str, is_update: bool) -> None:
    assert run_ranks(_watched_during, name, is_update, num_ranks=1) == [["running a step"]]


class _Pieces(io.StringIO):
    """Notes what is written in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def _say_that_it_is_stuck() -> tuple[list[str], list[int]]:
    """Return what a rank writes that has been stuck, and the statuses with which it ends."""
    stream, statuses = _Pieces(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "__stderr__", stream)
        patch.setattr(os, "_exit", statuses.append)
        watchdog = Watchdog(1000.0, store=HashStore(), rank=0, num_ranks=1)
        watchdog._end("running a step")
    return stream.pieces, statuses


def test_stacks_are_written_line_by_line_each_with_its_rank() -> None:
    """Several ranks write at once: what comes in parts would be unreadable."""
    [(pieces, statuses)] = run_ranks(_say_that_it_is_stuck, num_ranks=1, process_group=False)

    told, *stacks = pieces
    assert "Rank 0 has been running a step for 1000 s. Its stacks:\n" in told
    assert all(line.startswith("rank 0: ") and line.find("\n") == len(line) - 1 for line in stacks)
    assert any(line.endswith(" in _say_that_it_is_stuck\n") for line in stacks)
    assert statuses == [75]
