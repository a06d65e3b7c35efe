"""A save that is written by a thread while training goes on (`async_save`).

The thread of each rank does what a synchronous save does, over a process group of its own. The main
threads look after it together: before each update they ask whether all threads are done, and then
take over the result, so that an error is raised in the same update on every rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from accelerate_megatron import engine
from accelerate_megatron.checkpoint.staging import Staging
from accelerate_megatron.checkpoint.together import on_every_rank
from accelerate_megatron.log import get_logger

logger = get_logger(__name__)

Write = Callable[["dist.ProcessGroup | None"], None]


class BackgroundSave:
    """At most one save at a time that is being written in the background.

    Attributes:
        staging: The copies that are written from.
    """

    def __init__(self, device: torch.device) -> None:
        """Be ready; nothing is started.

        Args:
            device: Where the ranks' numbers for agreeing lie.
        """
        self.staging = Staging()
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._finish: Callable[[], None] = lambda: None
        self._error: BaseException | None = None

    def reserve(self, pieces: engine.TensorPieces) -> None:
        """Begin to make the memory that `pieces` will be copied to, in a thread."""
        atexit.register(self.staging.stop)
        self.staging.reserve(pieces)

    def close(self) -> None:
        """Let go of the memory. Every rank calls it, after `wait`; no save can follow."""
        self.staging.stop()
        atexit.unregister(self.staging.stop)
        atexit.unregister(self._wait_at_exit)
        self.staging = Staging()

    def start(self, write: Write, finish: Callable[[], None]) -> None:
        """Begin to write. Every rank calls it, after `wait`.

        Args:
            write: Writes and commits, over the group it is given; in the thread.
            finish: Called in the main thread when the checkpoint is complete.
        """
        assert self._thread is None, "the save before must have been waited for"
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
            atexit.register(self._wait_at_exit)
        self._finish = finish

        def run() -> None:
            try:
                write(self._group)
            except BaseException as error:  # the main thread raises it
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def before_update(self) -> None:
        """Take over a save that all ranks have written. Every rank calls it before an update.

        Raises:
            CheckpointError: It failed; alike on every rank.
        """
        if self._thread is None:
            return
        is_done = torch.tensor([float(not self._thread.is_alive())], device=self._device)
        dist.all_reduce(is_done, op=dist.ReduceOp.MIN)
        if is_done.item() == 1:
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is being written, if there is one. Every rank calls it.

        Raises:
            CheckpointError: It failed; alike on every rank.
        """
        if self._thread is None:
            return
        self._thread.join()
        error, self._error, self._thread = self._error, None, None
        on_every_rank(lambda: _raise(error))
        self._finish()

    def _wait_at_exit(self) -> None:
        """Let a save that nobody has waited for be completed, or end the process as failed.

        The other ranks may be gone, so nothing is agreed on here.
        """
        if self._thread is None:
            return
        self._thread.join()
        if self._error is not None:
            logger.error("The last checkpoint could not be written: %s", self._error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exception raised here would leave status 0


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
