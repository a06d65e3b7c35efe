"""The methods of `Accelerator` by which ranks wait for each other and collect tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.state import is_last_local_process
from accelerate_megatron.training.gather import (
    cut_filler_rows,
    gather_rows,
    pad_rows,
    reduce_tensors,
)
from accelerate_megatron.training.loader import PreparedDataLoader


class BetweenRanks:
    """Waiting, printing and gathering, where Accelerate's would do nothing or count twice."""

    # Of accelerate.Accelerator and of ours:
    device: torch.device
    gradient_state: Any
    is_main_process: bool
    process_index: int
    num_processes: int
    _running: Any

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the main rank of its machine: the last one on it."""
        return is_last_local_process(self.process_index, self.num_processes)

    def wait_for_everyone(self) -> None:
        """Return when every rank of the job has called it."""
        dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the main rank run the block before all others."""
        yield from self._goes_first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the main rank of each machine run the block before the others of it."""
        yield from self._goes_first(self.is_local_main_process)

    def _goes_first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            dist.barrier()
        try:
            yield
        finally:  # the others wait, also when the block failed
            if is_first:
                dist.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main rank of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  # it is what this method is for

    def gather(self, tensor: Any) -> Any:
        """Concatenate over the data-parallel ranks; see `training.gather.gather_rows`."""
        return gather_rows(tensor, self._running.ranks.dp_group)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without the rows that filled up a short last batch."""
        if use_gather_object:
            raise UnsupportedError("use_gather_object is not supported; gather tensors.")
        loader = self.gradient_state.active_dataloader
        if isinstance(loader, PreparedDataLoader):
            input_data = cut_filler_rows(input_data, loader.batch_size, loader.num_real_rows)
        return self.gather(input_data)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False
    ) -> Any:
        """Pad to the largest size on the data-parallel ranks, for `gather`."""
        group = self._running.ranks.dp_group
        return pad_rows(tensor, group, dim=dim, value=pad_index, at_the_front=pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Add or average over the data-parallel ranks."""
        return reduce_tensors(tensor, self._running.ranks.dp_group, reduction, scale)

    def check_trigger(self) -> bool:
        """Return whether any rank called `set_trigger` since the last check; all ranks call it."""
        is_set = getattr(self, "flag_tensor", None) is not None
        flag = torch.tensor([float(is_set)], device=self.device)
        dist.all_reduce(flag)
        self.flag_tensor = None
        return bool(flag.item() > 0)
