"""Numbered checkpoints, `latest`, what is kept, who may write, and what a kill leaves behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelerate_megatron.checkpoint import files, folders, saving, writing
from accelerate_megatron.checkpoint.lock import lock
from accelerate_megatron.checkpoint.manifest import MANIFEST_NAME, Manifest
from accelerate_megatron.errors import CheckpointError, CheckpointLockedError
from tests.checkpoint.tensors import data_folder
from tests.checkpoint.training import ONE_RANK, Run, make, train
from tests.helpers.ranks import run_ranks
from tests.parity.training import LayoutCase

AUTOMATIC = {1: "", 2: "", 3: "", 4: ""}
MANIFEST = Manifest(
    checkpoint_id="1",
    folder="state-1",
    step=1,
    created=0.0,
    has_optimizer=False,
    run={},
    files={},
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_checkpoints_are_numbered_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    run = Run(LayoutCase(2), project=str(tmp_path), total_limit=2, steps=4, save=AUTOMATIC)

    run_ranks(train, run, num_ranks=2)

    checkpoints = tmp_path / "checkpoints"
    assert names(checkpoints) == ["checkpoint_2", "checkpoint_3", "latest"]
    assert (checkpoints / "latest").read_text() == "checkpoint_3\n"
    assert json.loads((checkpoints / "checkpoint_3/manifest.json").read_text())["step"] == 4


def test_load_state_takes_the_latest_and_numbers_go_on(tmp_path: Path) -> None:
    run = Run(project=str(tmp_path), steps=4, save={1: "", 3: ""})
    [whole] = run_ranks(train, run, num_ranks=1)

    [resumed] = run_ranks(train, replace(run, load="latest", save={4: ""}), num_ranks=1)

    assert resumed.losses == whole.losses[3:]
    assert names(tmp_path / "checkpoints") == [*(f"checkpoint_{n}" for n in range(3)), "latest"]


def test_a_checkpoint_is_replaced_by_a_newer_one_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "state-2024").mkdir()
    run = Run(steps=4, save={1: str(folder), 3: str(folder)})
    [whole] = run_ranks(train, run, num_ranks=1)

    [resumed] = run_ranks(train, replace(run, load=str(folder), save={}), num_ranks=1)

    assert resumed.losses == whole.losses[3:]
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(list(folder.glob("state-*"))) == 2
    assert (folder / "state-2024").is_dir()


def _heard() -> list[str]:
    """Return the list that gets all that is logged from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate_megatron").addHandler(handler)
    return told


def _save_with_a_failure_in(function: str, project: str) -> list[str]:
    def fail(*_args: Any) -> None:
        raise OSError("the disk is gone")

    original = getattr(folders, function)
    accelerator, *_ = make(Run(project=project, total_limit=1))
    accelerator.save_state()
    told = _heard()
    setattr(folders, function, fail)
    try:
        saved = accelerator.save_state()
    finally:
        setattr(folders, function, original)
    assert accelerator.load_state(saved) == saved
    return told


@pytest.mark.parametrize("function", ["settle", "point_latest", "keep_newest"])
def test_a_failure_after_the_commit_is_told_and_the_save_has_succeeded(
    function: str, tmp_path: Path
) -> None:
    [told] = run_ranks(_save_with_a_failure_in, function, str(tmp_path), num_ranks=1)

    assert len(told) == 1
    assert "checkpoint_1 is complete and can be loaded" in told[0]
    assert "the disk is gone" in told[0]
    # The old one is kept as long as the new one may not be on the disk.
    assert (tmp_path / "checkpoints/checkpoint_0").is_dir()


def test_a_failure_of_the_commit_itself_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, temporary = tmp_path / "kept", tmp_path / ".kept.saving-1"
    (old / "state-0").mkdir(parents=True)
    (old / MANIFEST_NAME).write_text("old")
    (temporary / "state-1").mkdir(parents=True)

    def fail(source: Path, target: Path) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(folders, "replace_file", lambda *_: None)
    monkeypatch.setattr(folders.os, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        folders.commit(temporary, old, MANIFEST)

    assert names(old) == [MANIFEST_NAME, "state-0"]
    assert (old / MANIFEST_NAME).read_text() == "old"


def _resume_automatically(project: str, layout: LayoutCase = ONE_RANK) -> tuple[Any, ...]:
    told = _heard()
    accelerator, model, *_ = make(Run(layout, project=project))
    loaded = accelerator.load_state("auto")
    return loaded, model.session.num_updates, told


def test_auto_starts_anew_only_where_there_is_nothing(tmp_path: Path) -> None:
    results = run_ranks(_resume_automatically, str(tmp_path), LayoutCase(2), num_ranks=2)

    assert results == [(None, 0, [])] * 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "manifest"])
def test_auto_falls_back_to_the_last_good_one_and_says_so(damage: str, tmp_path: Path) -> None:
    run_ranks(train, Run(project=str(tmp_path), steps=2, save={1: "", 2: ""}), num_ranks=1)
    newest = tmp_path / "checkpoints/checkpoint_1"
    path = data_folder(newest) / "tensors/__0_0.distcp"
    if damage == "manifest":
        (newest / "manifest.json").write_text("{")
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-1] if damage == "truncate" else content)

    [(loaded, updates, told)] = run_ranks(_resume_automatically, str(tmp_path), num_ranks=1)

    assert loaded.endswith("checkpoint_0")
    assert updates == 1
    assert any("checkpoint_1" in line for line in told), told


def test_auto_with_damaged_checkpoints_only_is_no_fresh_start(tmp_path: Path) -> None:
    run_ranks(train, Run(project=str(tmp_path), steps=1, save={1: ""}), num_ranks=1)
    (data_folder(tmp_path / "checkpoints/checkpoint_0") / "run.json").write_text("")

    with pytest.raises(CheckpointError, match="all of them are damaged"):
        run_ranks(_resume_automatically, str(tmp_path), num_ranks=1)


# --- kills during a save -------------------------------------------------------------------


# Moment of a save -> what is called then, for the how many-th time, and whether to die after it.
MOMENT_OF = {
    "folder made": (saving, "capture_run", 1, False),
    "first bytes": (files.HashingFile, "write", 3, False),
    "half of the tensors": (files.HashingFile, "write", 400, False),
    "tensors written": (writing, "write_file", 1, False),
    "all but the manifest": (folders, "replace_file", 1, False),
    "all but the rename": (folders, "replace_file", 1, True),
    "data renamed": (os, "replace", 2, False),
    "renamed": (folders, "commit", 1, True),
}


def _die_at(moment: str) -> None:
    """Let this process be killed at `moment` of the next save."""
    owner, name, when, dies_after = MOMENT_OF[moment]
    real = getattr(owner, name)
    calls = {"count": 0}

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls["count"] += 1
        if calls["count"] == when and not dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls["count"] == when and dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapper)


def _save_and_die(run: Run, moment: str, rank: int) -> None:
    accelerator, model, _, loader, _ = make(run)
    model.train()
    for step, batch in enumerate(loader):
        model(**batch)
        if step == 0:
            accelerator.save_state(run.save[1] or None)
            accelerator.wait_for_save()
        elif step == 1:
            if accelerator.process_index == rank:
                _die_at(moment)
            accelerator.save_state(run.save[2] or None)
            accelerator.wait_for_save()
            raise AssertionError("the process should be dead")


MOMENTS = [
    pytest.param("folder made", marks=pytest.mark.slow),
    pytest.param("first bytes", marks=pytest.mark.slow),
    "half of the tensors",
    pytest.param("tensors written", marks=pytest.mark.slow),
    pytest.param("all but the manifest", marks=pytest.mark.slow),
    "all but the rename",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_during_a_save_leaves_the_previous_checkpoint(moment: str, tmp_path: Path) -> None:
    run = Run(LayoutCase(2), project=str(tmp_path), save={1: "", 2: ""})
    results = run_ranks(_save_and_die, run, moment, 0, num_ranks=2, errors="return")
    assert "SIGKILL" in str(results[0])
    checkpoints = tmp_path / "checkpoints"
    left = [path.name for path in folders.find_unfinished(checkpoints)]
    assert len(left) == 1

    [(loaded, updates, told), _] = run_ranks(
        _resume_automatically, str(tmp_path), run.layout, num_ranks=2
    )
    run_ranks(train, Run(project=str(tmp_path), steps=1, save={1: ""}), num_ranks=1)

    assert loaded.endswith("checkpoint_0")
    assert updates == 1
    assert any(left[0] in line and "interrupted" in line for line in told), told
    assert names(checkpoints) == ["checkpoint_0", "checkpoint_1", "latest"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["first bytes", "tensors written", "all but the rename"])
def test_a_kill_during_a_save_in_the_background_leaves_the_previous_checkpoint(
    moment: str, tmp_path: Path
) -> None:
    plugin = {"other_megatron_args": {"async_save": True}}
    run = Run(LayoutCase(2), plugin=plugin, project=str(tmp_path), save={1: "", 2: ""})
    results = run_ranks(_save_and_die, run, moment, 0, num_ranks=2, errors="return")
    assert "SIGKILL" in str(results[0])

    [(loaded, updates, _)] = run_ranks(_resume_automatically, str(tmp_path), num_ranks=1)

    assert loaded.endswith("checkpoint_0")
    assert updates == 1


@pytest.mark.slow
def test_a_kill_of_another_rank_during_a_save_leaves_the_previous_one(tmp_path: Path) -> None:
    layout = LayoutCase(2, {"tp_degree": 2})
    run = Run(layout, project=str(tmp_path), save={1: "", 2: ""})

    results = run_ranks(_save_and_die, run, "half of the tensors", 1, num_ranks=2, errors="return")

    assert "SIGKILL" in str(results[1])
    [(loaded, updates, _)] = run_ranks(_resume_automatically, str(tmp_path), num_ranks=1)
    assert loaded.endswith("checkpoint_0")
    assert updates == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["all but the manifest", "data renamed"])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_one(
    moment: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    run = Run(save={1: folder, 2: folder})
    [killed] = run_ranks(_save_and_die, run, moment, 0, num_ranks=1, errors="return")
    assert "SIGKILL" in str(killed)

    manifest = json.loads(Path(folder, "manifest.json").read_text())
    run_ranks(train, Run(steps=1, load=folder), num_ranks=1)
    run_ranks(train, Run(steps=3, save={3: folder}), num_ranks=1)

    assert manifest["step"] == 1
    assert json.loads(Path(folder, "manifest.json").read_text())["step"] == 3
    assert len(list(Path(folder).glob("state-*"))) == 1
    assert not folders.find_unfinished(tmp_path)


def test_a_kill_after_the_rename_leaves_the_new_one(tmp_path: Path) -> None:
    run = Run(project=str(tmp_path), save={1: "", 2: ""})
    run_ranks(_save_and_die, run, "renamed", 0, num_ranks=1, errors="return")

    [(loaded, updates, _)] = run_ranks(_resume_automatically, str(tmp_path), num_ranks=1)

    assert loaded.endswith("checkpoint_1")
    assert updates == 2


# --- who may write, and where ----------------------------------------------------------------

_HOLD = """
import sys
from pathlib import Path
from accelerate_megatron.checkpoint.lock import lock
lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()  # until it is killed
"""
SOURCES = Path(__file__).parents[2] / "src"


def test_a_second_job_is_locked_out_until_the_first_is_gone(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = str(tmp_path / "checkpoints/.lock")
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == b"locked\n"
    run = Run(LayoutCase(2), project=str(tmp_path), steps=1, save={1: ""})

    try:
        errors = run_ranks(train, run, num_ranks=2, errors="return")
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()

    for error in errors:
        assert isinstance(error, CheckpointLockedError)
        assert f"process {other.pid}" in str(error)
    run_ranks(train, run, num_ranks=2)


def _lock_after_a_holder_that_has_forked(path: str) -> None:
    """Let another process take the lock, fork a worker and end; then take the lock here."""
    holder = os.fork()
    if holder == 0:
        lock(Path(path))
        if os.fork() == 0:
            signal.pause()  # until the test has ended this rank and all that it started
        os._exit(0)
    _, status = os.waitpid(holder, 0)
    assert status == 0
    lock(Path(path))


def test_what_a_killed_job_has_forked_locks_nobody_out(tmp_path: Path) -> None:
    path = str(tmp_path / ".lock")

    run_ranks(_lock_after_a_holder_that_has_forked, path, num_ranks=1, process_group=False)


def _output_problem(path: Path, kind: str) -> str:
    if kind == "a file":
        path.write_text("")
        return "is a file|a part of the path is a file"
    path.mkdir()
    (path / "checkpoints").write_text("")
    return "checkpoints is a file"


@pytest.mark.parametrize("kind", ["a file", "a file inside"])
def test_an_output_folder_that_is_a_file_is_refused_before_the_first_update(
    kind: str, tmp_path: Path
) -> None:
    message = _output_problem(tmp_path / "project", kind)

    with pytest.raises(CheckpointError, match=message):
        run_ranks(make, Run(project=str(tmp_path / "project")), num_ranks=1)


def test_a_missing_output_folder_is_made(tmp_path: Path) -> None:
    run = Run(project=str(tmp_path / "a/b"), steps=1, save={1: ""})

    run_ranks(train, run, num_ranks=1)

    assert (tmp_path / "a/b/checkpoints/checkpoint_0/manifest.json").is_file()


def _check_as_nobody(folder: str) -> None:
    os.setuid(65534)
    folders.check_can_write(Path(folder))


def test_a_read_only_output_folder_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become a user without permission")
    tmp_path.chmod(0o755)
    folder = tmp_path / "checkpoints"
    folder.mkdir(mode=0o555)

    with pytest.raises(CheckpointError, match=r"cannot be written to \(Permission denied"):
        run_ranks(_check_as_nobody, str(folder), num_ranks=1, process_group=False)


@pytest.mark.parametrize(
    "change",
    [{"step": 1e999}, {"created": 10**400}, {"files": {"a": {"num_bytes": 1e999, "sha256": ""}}}],
    ids=lambda change: next(iter(change)),
)
def test_a_number_that_is_none_damages_a_manifest(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "checkpoint_0").mkdir()
    text = json.dumps(json.loads(MANIFEST.to_json()) | change)
    (tmp_path / "checkpoint_0" / MANIFEST_NAME).write_text(text)

    [found] = folders.find_checkpoints(tmp_path)

    assert "manifest.json is damaged" in found.problem


def test_a_manifest_that_is_nested_too_deeply_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_0").mkdir()
    (tmp_path / "checkpoint_0" / MANIFEST_NAME).write_text("[" * 200_000)

    [found] = folders.find_checkpoints(tmp_path)

    assert "manifest.json cannot be read" in found.problem


@pytest.mark.parametrize("limit", [0, -1])
def test_the_newest_checkpoint_stays_whatever_the_limit(limit: int, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"checkpoint_{number}").mkdir()
        (tmp_path / f"checkpoint_{number}" / MANIFEST_NAME).touch()

    folders.keep_newest(tmp_path, limit)

    assert names(tmp_path) == ["checkpoint_1"]


def test_numbered_checkpoints_leave_another_jobs_save_alone(tmp_path: Path) -> None:
    for name in (".best.saving-1", ".checkpoint_1.saving-1", ".checkpoint_0.deleting"):
        (tmp_path / name).mkdir()

    folders.remove_leftovers(tmp_path, None)

    assert names(tmp_path) == [".best.saving-1"]
