"""`async_save`: training goes on while files are written, and all else is as without it."""

from __future__ import annotations

import atexit
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, engine
from accelerate_megatron.checkpoint import files, saving
from accelerate_megatron.checkpoint.staging import Staging
from accelerate_megatron.errors import CheckpointError
from tests.checkpoint.test_resume import DIST, GPT2, check_equal
from tests.checkpoint.training import Run, make, train
from tests.faults.test_jobs import REPOSITORY, end, start
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyOptimizer
from tests.parity.training import LayoutCase

ASYNC = {"other_megatron_args": {"async_save": True}}
IN_BACKGROUND = Run(LayoutCase(2, DIST), GPT2, plugin=ASYNC)


def _train_while_writing(run: Run, folder: str) -> dict[str, Any]:
    """Save after update 3, and let the files be written only after two more updates."""
    may_write = threading.Event()
    real = saving.write_capture

    def write_later(*args: Any) -> Any:
        assert may_write.wait(60)
        return real(*args)

    saving.write_capture = write_later
    accelerator, model, _, loader, counter = make(run)
    seen: dict[str, Any] = {"losses": [], "was there": []}
    model.train()
    for batch in loader:
        seen["losses"].append(model(**batch).loss.item())
        counter.steps += 1
        seen["was there"].append(Path(folder).exists())
        if counter.steps == 3:
            accelerator.save_state(folder)
        if counter.steps == 5:
            break
    may_write.set()
    accelerator.end_training()
    seen["is there"] = Path(folder, "manifest.json").is_file()
    return seen


def test_training_goes_on_while_a_checkpoint_is_written_that_resumes_exactly(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "checkpoint")
    whole = run_ranks(train, replace(IN_BACKGROUND, plugin={}), num_ranks=2)

    saved = run_ranks(_train_while_writing, IN_BACKGROUND, folder, num_ranks=2)
    resumed = run_ranks(train, replace(IN_BACKGROUND, load=folder), num_ranks=2)

    for seen, rank in zip(saved, whole, strict=True):
        assert seen["losses"] == rank.losses[:5]
        assert seen["was there"] == [False] * 5
        assert seen["is there"]
    for rest, rank in zip(resumed, whole, strict=True):
        rest.counter["average"] = rank.counter["average"]  # not counted by the loop above
    check_equal(whole, resumed, 3)


def _fail_once(run: Run, rank: int) -> dict[str, Any]:
    """Save after each of the first two updates; the second save fails on one rank."""
    accelerator, model, _, loader, _ = make(run)
    real = files.HashingFile.write
    seen: dict[str, Any] = {"raised at": [], "updates": 0}

    def fail(*_args: Any) -> int:
        raise OSError(5, "Input/output error")

    model.train()
    for step, batch in enumerate(loader):
        try:
            model(**batch)
        except CheckpointError as error:
            seen["raised at"].append(step)
            seen["error"] = str(error)
            files.HashingFile.write = real  # type: ignore[method-assign]
            model(**batch)
        accelerator.wait_for_save()
        if step == 1 and accelerator.process_index == rank:
            files.HashingFile.write = fail  # type: ignore[method-assign]
        if step < 2:
            accelerator.save_state()
        if step == 1:
            accelerator._background_save._thread.join()
            accelerator.wait_for_everyone()
    accelerator.save_state()
    accelerator.end_training()
    seen["updates"] = model.session.num_updates
    return seen


def test_an_error_is_raised_in_the_next_update_on_every_rank_and_training_goes_on(
    tmp_path: Path,
) -> None:
    run = Run(LayoutCase(2), plugin=ASYNC, project=str(tmp_path), shuffle=False)

    ranks = run_ranks(_fail_once, run, 1, num_ranks=2)

    assert ranks[0] == ranks[1]
    assert ranks[0]["raised at"] == [2]
    assert "checkpoint_1 could not be written" in ranks[0]["error"]
    assert "rank 1" in ranks[0]["error"]
    assert ranks[0]["updates"] == 5
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".lock", "checkpoint_0", "checkpoint_1", "latest"]


def _memory_of_saves(run: Run, folder: str) -> dict[str, Any]:
    """Save twice; return which buffers there were before the first, and after each."""
    accelerator, *_ = make(run)
    staging = accelerator._background_save.staging

    def addresses() -> dict[Any, int]:
        return {key: buffer.data_ptr() for key, buffer in staging._buffers.items()}

    staging._join()
    seen: dict[str, Any] = {"made": addresses()}
    for name in ("first", "second"):
        accelerator.save_state(folder)
        accelerator.wait_for_save()
        seen[name] = addresses()
    accelerator.free_memory()
    seen["left"] = len(accelerator._background_save.staging._buffers)
    return seen


@pytest.mark.parametrize("layout", [LayoutCase(2), LayoutCase(2, DIST)], ids=["plain", "dist"])
def test_the_memory_of_saves_is_made_before_the_first_and_kept_until_the_model_is_dropped(
    tmp_path: Path, layout: LayoutCase
) -> None:
    run = Run(layout, GPT2, plugin=ASYNC)

    first_rank, second_rank = run_ranks(_memory_of_saves, run, str(tmp_path / "one"), num_ranks=2)

    assert first_rank["made"], "the first data-parallel rank writes"
    assert not second_rank["made"], "the other one has nothing to write"
    for seen in (first_rank, second_rank):
        assert seen["made"] == seen["first"] == seen["second"]
        assert seen["left"] == 0
    has_states = any(name.startswith("optimizer.") for name, _ in first_rank["made"])
    assert has_states == (layout.plugin.get("use_distributed_optimizer") is None)


def test_memory_that_is_being_made_does_not_keep_a_process_from_ending() -> None:
    staging = Staging()
    large = torch.empty(1 << 24)
    pieces = engine.TensorPieces(
        {str(index): [SimpleNamespace(data=large)] for index in range(100)}  # type: ignore[list-item]
    )

    staging.reserve(pieces)
    staging.stop()

    assert len(staging._buffers) < 100


def test_no_memory_is_made_in_a_process_that_is_ending() -> None:
    staging = Staging()
    pieces = engine.TensorPieces({"x": [SimpleNamespace(data=torch.empty(4))]})  # type: ignore[list-item]
    staging.stop()

    staging.reserve(pieces)
    staging.stop()

    assert not staging._buffers


def _save_without_memory(run: Run, rank: int, folder: str) -> str:
    """Save where one rank has no memory for the copies; return what is raised."""
    accelerator, *_ = make(run)

    def fail(*_args: Any) -> None:
        raise MemoryError("no room for copies")

    if accelerator.process_index == rank:
        accelerator._background_save.staging.hold = fail
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state(folder)
    return str(caught.value)


def test_no_rank_waits_for_one_that_has_no_memory_for_the_copies(tmp_path: Path) -> None:
    run = Run(LayoutCase(2), plugin=ASYNC)

    told = run_ranks(_save_without_memory, run, 1, str(tmp_path / "one"), num_ranks=2)

    assert told == ["rank 1: MemoryError: no room for copies"] * 2
    assert not list(tmp_path.glob(".one.saving*"))


def _save_at_once(run: Run) -> list[str]:
    """Save four times without a pause; return what the threads did, in order."""
    told: list[str] = []
    real_write, real_commit = saving.write_capture, saving.commit

    def write(*args: Any) -> Any:
        told.append("begin")
        return real_write(*args)

    def commit(*args: Any) -> Any:
        real_commit(*args)
        told.append("end")

    saving.write_capture, saving.commit = write, commit  # type: ignore[assignment]
    accelerator, model, _, loader, _ = make(run)
    model.train()
    model(**next(iter(loader)))
    for _ in range(4):
        accelerator.save_state()
    accelerator.end_training()
    return told


def test_saves_do_not_overlap_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    run = Run(LayoutCase(2), plugin=ASYNC, project=str(tmp_path), total_limit=2)

    told, _ = run_ranks(_save_at_once, run, num_ranks=2)

    assert told == ["begin", "end"] * 4
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".lock", "checkpoint_2", "checkpoint_3", "latest"]
    assert (tmp_path / "checkpoints/latest").read_text() == "checkpoint_3\n"


def _end_while_writing(run: Run) -> bool:
    """Make another `Accelerator` while a save is written, and end; return whether it is there."""
    real = saving.write_capture

    def write_late(*args: Any) -> Any:
        time.sleep(0.5)
        return real(*args)

    saving.write_capture = write_late
    accelerator, *_ = make(run)
    folder = accelerator.save_state()
    Accelerator(cpu=True)
    atexit._run_exitfuncs()
    return Path(folder, "manifest.json").is_file()


def test_another_accelerator_does_not_make_the_end_come_before_the_last_save(
    tmp_path: Path,
) -> None:
    run = Run(plugin=ASYNC, project=str(tmp_path))

    assert run_ranks(_end_while_writing, run, num_ranks=1) == [True]


SCRIPT = str(REPOSITORY / "tests/checkpoint/ending.py")


@pytest.mark.slow
def test_a_script_that_ends_waits_for_its_last_save(tmp_path: Path) -> None:
    status, output = end(start(2, tmp_path, "good", script=SCRIPT))

    assert status == 0, output[-4000:]
    assert (tmp_path / "checkpoints/latest").read_text() == "checkpoint_0\n"


@pytest.mark.slow
def test_a_script_whose_last_save_fails_ends_with_an_error(tmp_path: Path) -> None:
    status, output = end(start(2, tmp_path, "bad", script=SCRIPT))

    assert status == 1, output[-4000:]
    assert "The last checkpoint could not be written" in output
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".lock"]


def test_memory_for_saves_changes_no_update() -> None:
    dampened = TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})
    run = Run(optimizer=dampened, steps=3)

    [plain] = run_ranks(train, run, num_ranks=1)
    [reserved] = run_ranks(train, replace(run, plugin=ASYNC), num_ranks=1)

    assert reserved.losses == plain.losses
