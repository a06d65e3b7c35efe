"""What the watchdog looks at: whatever a rank may wait in for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

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
