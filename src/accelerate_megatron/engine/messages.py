"""Messages to other stages that are still on their way."""

from __future__ import annotations

import torch
import torch.distributed as dist


class SentMessages:
    """Requests of sending, with the memory they read, until they are done.

    gloo neither owns the tensor nor delivers a message whose request is gone, and
    Megatron's interleaved schedule lets go of both early.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []

    def keep(self, request: dist.Work, tensor: torch.Tensor) -> None:
        """Hold on to a message; those that have arrived are let go."""
        self._pending = [(work, sent) for work, sent in self._pending if not work.is_completed()]
        self._pending.append((request, tensor.detach()))

    def wait(self) -> None:
        """Wait until all messages have arrived; called by a stage at the end of a schedule."""
        pending, self._pending = self._pending, []
        for request, _ in pending:
            # gloo's request counts arrivals: the second to wait for one waits for ever.
            if not request.is_completed():
                request.wait()


SENT = SentMessages()
