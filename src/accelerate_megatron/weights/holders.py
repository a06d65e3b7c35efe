"""How the ranks that hold a model send its pieces to the one that writes.

All communication of `weights/` is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accelerate_megatron import failures

T = TypeVar("T")


@dataclass(frozen=True)
class ModelHolders:
    """The ranks that hold one model; the last of them writes.

    The last rank is the one that Accelerate calls the main process for Megatron-LM.
    """

    group: dist.ProcessGroup | None = None
    """Their process group. None: this process holds the whole model and talks to nobody."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where tensors must be to be sent: cpu for gloo, this rank's GPU for NCCL."""

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def writer(self) -> int:
        """The position of the rank that writes."""
        return 0 if self.group is None else dist.get_world_size(self.group) - 1

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes."""
        return self.rank == self.writer

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order. Every rank must call it."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def on_writer(self, action: Callable[[], T], meanwhile: Callable[[], None] | None = None) -> T:
        """Run `action` on the writer; return its result on every rank, or raise alike on all.

        Every rank must call it. No rank leaves it before the writer is done.

        Args:
            action: What the writer does.
            meanwhile: What the other ranks do for it. An error there is raised at once: the writer
                may still wait for this rank's pieces, and nobody would hear of it.
        """
        if not self.is_writer and meanwhile is not None:
            meanwhile()
        return failures.on_one_rank(action if self.is_writer else None, self._from_writer)

    def _from_writer(self, value: Any) -> Any:
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(
            values, src=self._global(self.writer), group=self.group, device=self.device
        )
        return values[0]

    def send_to_writer(self, tensor: torch.Tensor) -> None:
        """Send this rank's tensor, and wait until the writer has taken it."""
        dist.send(
            tensor.to(self.device).contiguous(), dst=self._global(self.writer), group=self.group
        )

    def receive(self, owner: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return, on the CPU, the tensor that rank `owner` sends. Only the writer calls it."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, src=self._global(owner), group=self.group)
        return tensor.cpu()

    def _global(self, rank: int) -> int:
        if self.group is None:
            raise RuntimeError(f"rank {rank} was to be reached without a process group")
        return dist.get_global_rank(self.group, rank)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value`, in rank order; all of `group` call it, or else of the job."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
