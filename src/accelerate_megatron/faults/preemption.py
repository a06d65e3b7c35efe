"""SIGTERM, as a cluster sends it before it takes the machine: save after the step, and end well."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron.log import get_logger, is_logging_rank

logger = get_logger(__name__)


class Preemption:
    """Notes SIGTERM, and ends the job when all ranks are between two steps."""

    def __init__(self, accelerator: Any) -> None:
        """Take over the signal. Only in the main thread, where signals come in."""
        self._accelerator = accelerator
        self._is_asked = False
        if threading.current_thread() is threading.main_thread():
            _leave_to_forked_processes(signal.signal(signal.SIGTERM, self._note) or signal.SIG_DFL)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self._is_asked = True

    def after_step(self) -> None:
        """Save and leave if any rank got the signal. Every rank calls it after the same step.

        The signal reaches the ranks at different moments: they agree, by one number over all.

        Raises:
            SystemExit: With status 0, after the checkpoint is complete.
        """
        if not self._accelerator._running.model.training:
            return
        flag = torch.tensor([float(self._is_asked)], device=self._accelerator.device)
        dist.all_reduce(flag)
        if flag.item() == 0:
            return
        folder = self._accelerator.save_state()
        self._accelerator.wait_for_save()
        if is_logging_rank():
            logger.warning("Got SIGTERM: saved %s and ended.", folder)
        dist.barrier()
        raise SystemExit(0)


def _leave_to_forked_processes(handler: Any) -> None:
    """Let what this process forks have `handler` for SIGTERM, as if nobody had taken it over.

    Multiprocessing ends the workers of a pool so, and waits until they are gone. The signal is held
    back until the handler is in place: before, the forked process would note it and go on.
    """

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def change() -> None:
        signal.signal(signal.SIGTERM, handler)
        let_through()

    os.register_at_fork(before=hold, after_in_parent=let_through, after_in_child=change)
