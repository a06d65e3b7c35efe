"""Ranks on machines that do not share the folder of checkpoints: found, and said on every rank."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accelerate_megatron.errors import CheckpointError
from tests.checkpoint.training import Run, make, train
from tests.helpers.ranks import run_ranks
from tests.parity.training import LayoutCase

_CLONE_NEWNS = 0x20000
TWO_RANKS = Run(LayoutCase(2), steps=2)


def _can_mount() -> bool:
    """Return whether a process may have file systems of its own, as another machine has."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not _can_mount(), reason="needs the right to mount")


def _see_another_folder(folder: str) -> None:
    """Let this process see an empty folder of its own at `folder`, as on another machine."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)


def _call(method: str, folder: str, seen_by_one: str) -> Any:
    accelerator, *_ = make(TWO_RANKS)
    if dist.get_rank() == 1:
        _see_another_folder(seen_by_one)
    return getattr(accelerator, method)(folder)


def _errors(method: str, folder: Path) -> list[Any]:
    return run_ranks(_call, method, str(folder), str(folder.parent), num_ranks=2, errors="return")


def test_saving_to_a_folder_that_is_not_shared_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "disk/checkpoint"
    folder.parent.mkdir()

    for error in _errors("save_state", folder):
        assert isinstance(error, CheckpointError)
        assert "rank 1: " in str(error)
        assert "is not the same folder on all machines" in str(error)
    assert [path.name for path in folder.parent.iterdir()] == [".checkpoint.lock"]


@pytest.mark.slow
def test_loading_from_a_folder_that_is_not_shared_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "disk/checkpoint"
    folder.parent.mkdir()
    run = Run(LayoutCase(2), steps=1, save={1: str(folder)})
    run_ranks(train, run, num_ranks=2)

    for error in _errors("load_state", folder):
        assert isinstance(error, CheckpointError)
        assert "rank 1: " in str(error)
        assert "the folder is not shared by all machines" in str(error)
