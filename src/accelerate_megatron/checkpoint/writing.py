"""Writing what was captured, and the commit. Reads nothing of the run: a thread may call it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from accelerate_megatron import engine
from accelerate_megatron.checkpoint import folders
from accelerate_megatron.checkpoint.capture import Capture
from accelerate_megatron.checkpoint.files import FileFacts, facts_of, new_file, sync_folder
from accelerate_megatron.checkpoint.manifest import TENSORS, Manifest
from accelerate_megatron.checkpoint.storage import TensorWriter
from accelerate_megatron.checkpoint.target import Target, no_space
from accelerate_megatron.checkpoint.together import on_every_rank, on_first_rank
from accelerate_megatron.errors import CheckpointError
from accelerate_megatron.log import get_logger

logger = get_logger(__name__)


def write_capture(
    captured: Capture, target: Target, num_bytes: int, group: dist.ProcessGroup | None
) -> dict[str, FileFacts]:
    """Write all files, each rank its own, and wait until they are on the disk.

    Every rank calls it; communicates over `group`, None for the default one.

    Returns:
        Path in the folder of the data -> size and checksum, of the files of all ranks and of
        those that were there, written by hooks.

    Raises:
        CheckpointError: Some rank could not write; raised alike on all.
    """
    writer = TensorWriter(target.data / TENSORS, in_background=group is not None)
    try:
        engine.write_pieces(captured.pieces, writer, group)
    except CheckpointException as error:  # torch's, on all ranks; a BaseException
        failures = {rank: failure[0] for rank, failure in error.failures.items()}
        told = "; ".join(f"rank {rank}: {failure}" for rank, failure in failures.items())
        raise CheckpointError(_text_of(failures.values(), told, target, num_bytes)) from error
    written = {f"{TENSORS}/{name}": facts for name, facts in writer.written.items()}

    def write_own() -> dict[str, FileFacts]:
        try:
            for name, content in captured.files.items():
                written[name] = write_file(target.data / name, content)
        except OSError as error:
            raise CheckpointError(_text_of([error], str(error), target, num_bytes)) from error
        return written

    parts = on_every_rank(write_own, group)
    files = {name: facts for part in parts for name, facts in part.items()}
    return files | on_first_rank(lambda: _facts_of_others(target.data, files), group)


def write_file(path: Path, content: bytes) -> FileFacts:
    """Write a new file, and its folder if need be, and wait until it is on the disk."""
    path.parent.mkdir(exist_ok=True)
    with new_file(path) as file:
        file.write(content)
        return file.sync()


def commit(captured: Capture, target: Target, files: dict[str, FileFacts]) -> None:
    """Make what was written the checkpoint; delete the oldest ones after that. On one rank."""
    manifest = Manifest(
        checkpoint_id=target.checkpoint_id,
        folder=target.folder,
        step=captured.step,
        created=time.time(),
        has_optimizer=captured.has_optimizer,
        run=captured.run,
        files=files,
    )
    folders.commit(target.temporary, target.checkpoint, manifest)
    _follow_up(target, manifest)


def _follow_up(target: Target, manifest: Manifest) -> None:
    """Do what is left after the commit. The checkpoint is there: errors are told, not raised.

    After an error nothing more is deleted: the checkpoint may not be on the disk yet.
    """
    steps: list[Callable[[], None]] = [
        partial(folders.settle, target.temporary, target.checkpoint, manifest)
    ]
    if target.is_automatic:
        steps.append(partial(folders.point_latest, target.checkpoint))
        steps.append(partial(_delete_oldest, target))
    for step in steps:
        try:
            step()
        except Exception as error:  # whatever it is, the save has not failed
            logger.warning(
                "%s is complete and can be loaded, but tidying up after it failed: %s",
                target.checkpoint,
                error,
            )
            return


def _delete_oldest(target: Target) -> None:
    if target.total_limit is not None:
        for path in folders.keep_newest(target.checkpoint.parent, target.total_limit):
            logger.info("Deleted %s: only the newest %d are kept.", path, target.total_limit)


def _text_of(failures: Iterable[BaseException], told: str, target: Target, num_bytes: int) -> str:
    """Return what to say when writing failed; `told` is what the failures say themselves."""
    if any(getattr(failure, "errno", None) == errno.ENOSPC for failure in failures):
        free = shutil.disk_usage(target.checkpoint.parent).free
        return no_space(target, num_bytes, free)
    return f"The checkpoint {target.checkpoint} could not be written ({told})."


def _facts_of_others(data: Path, known: dict[str, FileFacts]) -> dict[str, FileFacts]:
    """Return the facts of the files that hooks wrote, and wait until they are on the disk."""
    found = {}
    for folder, _, names in os.walk(data):
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(data).as_posix()
            if relative not in known:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                found[relative] = facts_of(path)
        sync_folder(Path(folder))
    return found
