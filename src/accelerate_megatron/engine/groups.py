"""Process groups: where each rank stands on each axis.

Ranks and groups are handed out as one value, made once; nothing above the engine asks
Megatron's global state for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from accelerate_megatron.config.layout import Layout

_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank's position on each axis, and the groups it communicates in."""

    tp_rank: int
    cp_rank: int
    cp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    """The ranks that share the sequences of one replica."""
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    """The ranks of one data-parallel replica: they work on the same batch."""
    all_replicas: tuple[tuple[int, ...], ...]
    """The global ranks of each replica, ascending, by `dp_rank`."""
    last_stage_rank: int
    """Global rank that holds the last pipeline stage of this rank's pipeline."""

    @property
    def fetch_rank(self) -> int:
        """Global rank that fetches the batches of this rank's replica: its first."""
        return self.all_replicas[self.dp_rank][0]

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, where the loss is computed."""
        return self.pp_rank == self.pp_size - 1


def start_groups(
    layout: Layout, chunks_per_stage: int | None, timeout: timedelta | None = None
) -> Ranks:
    """Build all process groups. Every rank calls it, once per job, before building a model.

    Args:
        layout: The sizes of the axes.
        chunks_per_stage: Model chunks on each stage under interleaved 1F1B, else None.
        timeout: How long ranks wait for each other in them; None: Megatron's half an hour.
    """
    waiting = {} if timeout is None else {"distributed_timeout_minutes": timeout / _MINUTE}
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp_size,
        context_parallel_size=layout.cp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=chunks_per_stage,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        **waiting,
    )
    replica_group, all_replicas = _replica_groups(layout, timeout)
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    return Ranks(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=layout.cp_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=layout.pp_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        pp_group=pp_group,
        dp_group=parallel_state.get_data_parallel_group(),
        replica_group=replica_group,
        all_replicas=all_replicas,
        last_stage_rank=dist.get_process_group_ranks(pp_group)[-1],
    )


def _replica_groups(
    layout: Layout, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, tuple[tuple[int, ...], ...]]:
    """Make one group for each data-parallel replica; return this rank's, and all members.

    All ranks must make all groups, so each rank's place is gathered first.
    """
    mine = parallel_state.get_data_parallel_rank()
    places: list[int] = [0] * layout.world_size
    dist.all_gather_object(places, mine)
    members = tuple(
        tuple(rank for rank, place in enumerate(places) if place == replica)
        for replica in range(layout.dp_size)
    )
    groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in members]
    return groups[mine], members


def mean_over_data_parallel(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` over this rank's data-parallel group; all its ranks call it.

    Ranks where a value is NaN do not count: rows that fill up a batch have no mean loss (0 / 0).
    """
    is_number = ~values.isnan()
    sums = torch.stack([values.where(is_number, 0.0), is_number.to(values.dtype)])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return sums[0] / sums[1]


def data_parallel_group() -> dist.ProcessGroup:
    """Return this rank's data-parallel group; its ranks work on different samples."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group
