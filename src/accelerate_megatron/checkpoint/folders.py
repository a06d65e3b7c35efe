"""The folders around checkpoints: names, the commit, `latest`, what is kept, what was left over.

    checkpoints/              one run's
      latest                  the name of the newest complete one
      checkpoint_0/
        manifest.json         see `manifest`; replaced in one step
        state-<id>/           the data that the manifest names
      .checkpoint_1.saving-<id>/    being written; never loaded

Only one rank calls what changes something here.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from accelerate_megatron.checkpoint.files import replace_file, sync_folder
from accelerate_megatron.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from accelerate_megatron.errors import CheckpointError

LATEST_NAME = "latest"
_SAVING = re.compile(r"^\.(?P<name>.+)\.saving-[0-9a-f]+$")
_DELETING = re.compile(r"^\.(?P<name>.+)\.deleting$")
_AUTOMATIC = re.compile(r"^checkpoint_(?P<number>\d+)$")
_STATE = re.compile(r"^state-[0-9a-f]{16}$")


@dataclass(frozen=True)
class Found:
    """A folder that has a manifest: a complete checkpoint, or one whose manifest is bad."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


def automatic_folder(parent: Path, number: int) -> Path:
    """Return the folder of the checkpoint of that number."""
    return parent / f"checkpoint_{number}"


def number_of(checkpoint: Path) -> int | None:
    """Return the number of an automatic checkpoint; None for one of another name."""
    match = _AUTOMATIC.match(checkpoint.name)
    return int(match["number"]) if match else None


def next_number(parent: Path, at_least: int) -> int:
    """Return the number of the next automatic checkpoint: higher than any that is there."""
    numbers = (number_of(parent / name) for name in _names(parent))
    return max([at_least, *(number + 1 for number in numbers if number is not None)])


def temporary_folder(checkpoint: Path, checkpoint_id: str) -> Path:
    """Return where `checkpoint` is written before it is complete: beside it."""
    return checkpoint.parent / f".{checkpoint.name}.saving-{checkpoint_id}"


def check_can_write(folder: Path) -> None:
    """Raise unless new entries can be made in `folder`, which is made if it is missing.

    Raises:
        CheckpointError: It is a file, or cannot be made or written to.
    """
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except FileExistsError:
        raise CheckpointError(f"{folder} is a file; checkpoints need a folder there.") from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{folder} cannot be made: a part of the path is a file; checkpoints need a folder."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written to ({error.strerror}); choose another folder for "
            "checkpoints, or change its permissions."
        ) from error


def commit(temporary: Path, checkpoint: Path, manifest: Manifest) -> None:
    """Make the checkpoint in `temporary` the one at `checkpoint`; the manifest is written here.

    A new folder appears complete by one rename. In a folder that is there, only the manifest
    changes from the old checkpoint's to the new one's, by one rename; what else is in it stays.
    That rename is the last thing done: with an error the old checkpoint stands, without one the
    new. What is left to do then is `settle`.
    """
    for folder, _, _ in os.walk(temporary, topdown=False):
        sync_folder(Path(folder))
    replace_file(temporary / MANIFEST_NAME, manifest.to_json())
    if not checkpoint.exists():
        os.rename(temporary, checkpoint)
        return
    os.rename(temporary / manifest.folder, checkpoint / manifest.folder)
    try:
        sync_folder(checkpoint)
        os.replace(temporary / MANIFEST_NAME, checkpoint / MANIFEST_NAME)
    except OSError:
        shutil.rmtree(checkpoint / manifest.folder, ignore_errors=True)
        raise


def settle(temporary: Path, checkpoint: Path, manifest: Manifest) -> None:
    """Wait until a commit is on the disk, and delete what it replaced."""
    sync_folder(checkpoint.parent)
    sync_folder(checkpoint)
    if temporary.exists():
        shutil.rmtree(temporary)
    for name in _names(checkpoint):
        if _STATE.match(name) and name != manifest.folder:
            shutil.rmtree(checkpoint / name)


def point_latest(checkpoint: Path) -> None:
    """Let `latest` beside the checkpoint name it."""
    replace_file(checkpoint.parent / LATEST_NAME, checkpoint.name + "\n")


def find_checkpoints(parent: Path) -> list[Found]:
    """Return what has a manifest in `parent`, oldest first: by number, others by time before them.

    `latest` is not asked: a job that ends right after the rename has not written it yet.
    """
    found = []
    for name in _names(parent):
        path = parent / name
        if name.startswith(".") or not (path / MANIFEST_NAME).is_file():
            continue
        try:
            found.append(Found(path, read_manifest(path)))
        except CheckpointError as error:
            found.append(Found(path, None, str(error)))
    return sorted(found, key=_age)


def _age(found: Found) -> tuple[int, float]:
    number = number_of(found.path)
    return -1 if number is None else number, found.manifest.created if found.manifest else 0.0


def find_unfinished(parent: Path) -> list[Path]:
    """Return the folders of saves that were never completed."""
    return [parent / name for name in _names(parent) if _SAVING.match(name)]


def remove_leftovers(parent: Path, name: str | None) -> list[Path]:
    """Delete what interrupted saves and deletions left behind; return the unfinished saves.

    Only with the lock: another job's save would look the same.

    Args:
        parent: The folder of the checkpoints.
        name: The one checkpoint that the lock is for; None for all numbered ones.
    """
    removed = []
    for entry in _names(parent):
        match = _SAVING.match(entry) or _DELETING.match(entry)
        if match and (match["name"] == name if name else _AUTOMATIC.match(match["name"])):
            shutil.rmtree(parent / entry)
            if _SAVING.match(entry):
                removed.append(parent / entry)
    return removed


def keep_newest(parent: Path, limit: int) -> list[Path]:
    """Delete the oldest automatic checkpoints beyond `limit`, never the newest; return them."""
    found = [item.path for item in find_checkpoints(parent)]
    automatic = [path for path in found if number_of(path) is not None]
    surplus = automatic[: -max(limit, 1)]
    for path in surplus:
        # Renamed first: a deletion that is interrupted leaves no half of a checkpoint.
        doomed = path.with_name(f".{path.name}.deleting")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    return surplus


def _names(parent: Path) -> list[str]:
    return sorted(os.listdir(parent)) if parent.is_dir() else []
