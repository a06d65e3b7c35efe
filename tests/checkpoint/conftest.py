"""One checkpoint for all tests that only damage a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.training import Run, train
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a GPT-2 after two updates on one rank. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    run_ranks(train, Run(steps=2, save={2: str(folder)}), num_ranks=1)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved`."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint", symlinks=True))


@pytest.fixture
def load() -> Callable[..., list[object]]:
    """A function that loads a checkpoint on some ranks and returns what each rank raised."""

    def load(folder: Path | str, run: Run | None = None) -> list[object]:
        run = run or Run()
        from dataclasses import replace

        return run_ranks(
            train,
            replace(run, steps=0, load=str(folder)),
            num_ranks=run.layout.num_ranks,
            errors="return",
        )

    return load
