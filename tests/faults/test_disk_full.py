"""The disk is full while a checkpoint is written: an error, nothing left, and training goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate_megatron.checkpoint import saving
from accelerate_megatron.errors import CheckpointError
from tests.checkpoint.training import Run, make
from tests.helpers.ranks import run_ranks
from tests.parity.training import LayoutCase

# A checkpoint of the tiny model takes 2.7 MB: one fits, two do not.
DISK_BYTES = 5_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={DISK_BYTES}"
    if shutil.which("mount") is None:
        pytest.skip("needs the command mount")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if mount.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _train(run: Run, checks_space: bool) -> dict[str, Any]:
    if not checks_space:
        # As if another program took the space after it was looked at.
        saving._check_space = lambda *_args: None
    accelerator, model, optimizer, loader, _ = make(run)
    model.train()
    errors, losses = [], []
    for step, batch in enumerate(loader):
        losses.append(model(**batch).loss.item())
        optimizer.step()
        if step in (0, 1):
            try:
                accelerator.save_state()
                accelerator.wait_for_save()
            except CheckpointError as error:
                errors.append(str(error))
    return {"errors": errors, "losses": losses, "updates": model.session.num_updates}


IN_BACKGROUND = {"other_megatron_args": {"async_save": True}}


@pytest.mark.parametrize("checks_space", [True, False], ids=["foreseen", "while writing"])
@pytest.mark.parametrize(
    "plugin",
    [{}, pytest.param(IN_BACKGROUND, marks=pytest.mark.slow)],
    ids=["synchronous", "in the background"],
)
def test_a_full_disk_is_an_error_and_training_goes_on(
    plugin: dict[str, Any], checks_space: bool, small_disk: Path
) -> None:
    run = Run(LayoutCase(2), plugin=plugin, project=str(small_disk), shuffle=False)

    ranks = run_ranks(_train, run, checks_space, num_ranks=2)

    checkpoints = small_disk / "checkpoints"
    for seen in ranks:
        [error] = seen["errors"]
        assert f"not enough space for the checkpoint {checkpoints / 'checkpoint_1'}" in error
        assert "it needs 2" in error
        assert "are free" in error
        assert seen["updates"] == 5
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == [".lock", "checkpoint_0", "latest"]
    assert (checkpoints / "latest").read_text() == "checkpoint_0\n"
