"""One job at a time writes to a folder of checkpoints.

The lock is the kernel's, on a file beside the checkpoints: it ends with the process that holds it,
however that ends, so that a job that was killed locks nobody out. Processes that the holder has
forked, such as workers of a DataLoader, which outlive it for a while, have no part in it.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from accelerate_megatron.errors import CheckpointLockedError

_held: dict[Path, int] = {}


def lock(path: Path) -> None:
    """Hold the lock file `path` until this process ends. Held once is held.

    Raises:
        CheckpointLockedError: Another process holds it.
    """
    path = path.resolve()
    if path in _held:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # flock's would be shared with them
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointLockedError(
            f"Another job writes checkpoints to {path.parent} ({holder or 'unknown process'}): "
            "their files would get mixed up. Give this job a folder of its own, or end the other."
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held[path] = descriptor


def lock_path(checkpoint: Path, *, is_automatic: bool) -> Path:
    """Return the lock of a checkpoint: of the whole folder when its checkpoints are numbered."""
    if is_automatic:
        return checkpoint.parent / ".lock"
    return checkpoint.parent / f".{checkpoint.name}.lock"
