"""Log lines of this package: one line per job, not one per rank. Needs no torch.

Loggers are the standard library's, under `accelerate_megatron`; how much is shown is the
application's choice. What is *not* here: metrics, which go through Accelerate's trackers.
"""

from __future__ import annotations

import logging
import os

_said: set[tuple[str, str]] = set()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def is_logging_rank() -> bool:
    """Return whether this process speaks for the job: the last rank, as `is_main_process`.

    Read from the launcher's environment, so that it also holds before a process group exists.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("RANK", "0")) == world_size - 1


def log_once(logger: logging.Logger, message: str, *, level: int = logging.INFO) -> None:
    """Log `message` on one rank of the job, and only the first time it is given."""
    if not is_logging_rank() or (logger.name, message) in _said:
        return
    _said.add((logger.name, message))
    logger.log(level, message)
