"""`save_state`: all ranks write into a hidden folder, then one rank makes it the checkpoint.

What is written is taken from the run first (`capture.py`). Writing it (`writing.py`) no longer
reads the run, so that it may go on in a thread (`background.py`) while training does.
"""

from __future__ import annotations

import os
import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accelerate_megatron.checkpoint import folders
from accelerate_megatron.checkpoint.background import BackgroundSave
from accelerate_megatron.checkpoint.capture import capture_run
from accelerate_megatron.checkpoint.lock import lock, lock_path
from accelerate_megatron.checkpoint.manifest import TENSORS
from accelerate_megatron.checkpoint.target import CHECKPOINTS, Target, no_space
from accelerate_megatron.checkpoint.together import on_every_rank, on_first_rank, run_hooks
from accelerate_megatron.checkpoint.writing import commit, write_capture
from accelerate_megatron.errors import CheckpointError, ConfigurationError
from accelerate_megatron.log import get_logger, is_logging_rank

logger = get_logger(__name__)

SPARE_BYTES = 1 << 20
"""Room for what a checkpoint holds besides tensors."""


def save_state(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> str:
    """Write a checkpoint and return its folder. Every rank calls it.

    With `async_save` it returns when the state has been copied: `background.py` says what follows.

    Args:
        accelerator: The `Accelerator` with a prepared model.
        output_dir: The checkpoint's folder; not read when checkpoints are named automatically.

    Raises:
        CheckpointError: Something could not be written, now or by the last save. What was written
            is gone, the checkpoints that were there are as they were, and training may go on.
    """
    session = accelerator._running.session
    background: BackgroundSave = accelerator._background_save
    background.wait()
    target = on_first_rank(lambda: _choose_target(accelerator, output_dir))
    in_background = session.run.async_save
    try:
        on_every_rank(lambda: _check_shared(target))
        staging = background.staging if in_background else None
        captured = capture_run(accelerator, session, target.data, staging)
        num_bytes = sum(on_every_rank(captured.pieces.num_bytes))
        on_first_rank(lambda: _check_space(target, num_bytes))
        run_hooks(captured.hooks)
    except BaseException:
        _remove(target)
        raise

    def write(group: dist.ProcessGroup | None) -> None:
        try:
            files = write_capture(captured, target, num_bytes, group)
            on_first_rank(lambda: commit(captured, target, files), group)
        except BaseException:
            _remove(target)
            raise

    finish = partial(_finish, accelerator, target, captured.step)
    if in_background:
        background.start(write, finish)
    else:
        write(None)
        finish()
    return str(target.checkpoint)


def _finish(accelerator: Any, target: Target, step: int) -> None:
    """Note that the checkpoint is complete. Every rank calls it, in the main thread."""
    number = folders.number_of(target.checkpoint)
    if target.is_automatic and number is not None:
        accelerator.project_configuration.iteration = number + 1
    if is_logging_rank():
        logger.info("Saved %s after %d updates.", target.checkpoint, step)


def claim_checkpoint_folder(accelerator: Any) -> None:
    """Refuse, before the first update, a folder that checkpoints cannot be written to, and lock it.

    Every rank calls it. Does nothing unless checkpoints are named automatically: no folder is
    known before.

    Raises:
        CheckpointError: It is a file, or cannot be made or written to.
        CheckpointLockedError: Another job writes there.
    """
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return

    def check() -> None:
        folder = automatic_parent(accelerator)
        folders.check_can_write(folder)
        lock(lock_path(folders.automatic_folder(folder, 0), is_automatic=True))

    on_first_rank(check)


def automatic_parent(accelerator: Any) -> Path:
    """Return the folder of numbered checkpoints.

    Raises:
        ConfigurationError: No project_dir is set.
    """
    if accelerator.project_dir is None:
        raise ConfigurationError(
            "Checkpoints are named automatically, but there is no folder for them: set "
            "Accelerator(project_dir=...), or ProjectConfiguration(project_dir=...)."
        )
    return Path(accelerator.project_dir).absolute() / CHECKPOINTS


def _choose_target(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> Target:
    """Decide on the folder, take its lock and clean up after interrupted saves. On rank 0."""
    configuration = accelerator.project_configuration
    is_automatic = bool(configuration.automatic_checkpoint_naming)
    if is_automatic:
        parent = automatic_parent(accelerator)
        checkpoint = folders.automatic_folder(parent, 0)
    elif output_dir is None:
        raise ConfigurationError(
            "save_state was called without output_dir; give one, or set "
            "ProjectConfiguration(automatic_checkpoint_naming=True, project_dir=...)."
        )
    else:
        checkpoint = Path(os.path.abspath(output_dir))
        parent = checkpoint.parent
        if checkpoint.exists() and not checkpoint.is_dir():
            raise CheckpointError(f"{checkpoint} is a file; checkpoints need a folder there.")
    folders.check_can_write(parent)
    lock(lock_path(checkpoint, is_automatic=is_automatic))
    if is_automatic:
        number = folders.next_number(parent, configuration.iteration)
        checkpoint = folders.automatic_folder(parent, number)
    for path in folders.remove_leftovers(parent, None if is_automatic else checkpoint.name):
        logger.warning("Removed %s, a save that was interrupted before it was complete.", path)
    target = Target(
        checkpoint, uuid.uuid4().hex[:16], is_automatic, total_limit=configuration.total_limit
    )
    (target.data / TENSORS).mkdir(parents=True)
    (target.data / "ranks").mkdir()
    return target


def _check_shared(target: Target) -> None:
    if not target.data.is_dir():
        raise CheckpointError(
            f"{target.data.parent.parent} is not the same folder on all machines: what rank 0 made "
            "there is not seen here. Save to a file system that all machines share."
        )


def _check_space(target: Target, num_bytes: int) -> None:
    free = shutil.disk_usage(target.temporary).free
    if free < num_bytes + SPARE_BYTES:
        raise CheckpointError(no_space(target, num_bytes, free))


def _remove(target: Target) -> None:
    """Delete what was written. The ranks do not wait for each other here."""
    if dist.get_rank() == 0:
        shutil.rmtree(target.temporary, ignore_errors=True)
