"""When the loop over tokens ends: on all ranks at the same token, also when a streamer fails."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Pace:
    """Keeps this rank with those that go on together, and its streamer supplied."""

    def __init__(self, group: dist.ProcessGroup | None, streamer: Any) -> None:
        """Take who goes on together.

        Args:
            group: The ranks that have to end at the same token; each of them calls `is_over`
                after each. None: this rank knows by itself when the others end.
            streamer: Is given tokens as transformers' streamers are; None on most ranks.
        """
        self._group = group
        self._streamer = streamer
        self._failure: Exception | None = None

    def put(self, tokens: torch.Tensor) -> None:
        """Give the streamer of this rank tokens, int64 [b] or, the prompts, [b, s].

        What it raises is kept until `finish`: the other ranks wait for this one.
        """
        if self._streamer is None or self._failure is not None:
            return
        try:
            self._streamer.put(tokens.cpu())
        except Exception as failure:  # whatever it is, the other ranks have to hear of it
            self._failure = failure

    def is_over(self, is_done: bool) -> bool:
        """Say whether no more tokens are generated: all ranks are done, or a streamer failed."""
        failed = self._failure is not None
        if self._group is None:
            return is_done or failed
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        state = torch.tensor([int(not is_done), int(failed)], device=device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._group)
        goes_on, failed = map(bool, state.tolist())
        return failed or not goes_on

    def finish(self) -> None:
        """End the streamer of this rank.

        Raises:
            Exception: What it raised, before or now.
        """
        if self._failure is not None:
            raise self._failure
        if self._streamer is not None:
            self._streamer.end()
