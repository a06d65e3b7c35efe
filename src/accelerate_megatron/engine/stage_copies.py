"""Parameters of which several pipeline stages hold a copy, such as a shared word embedding.

Megatron knows two such parameters, the word embedding and learned positions, each on a list of
stages that is fixed when its groups are made. Here it can be any parameter on any stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import finalize_model_grads


class StageCopies:
    """The parameters of this rank that other stages of its pipeline hold too.

    Their gradients are summed over those stages at every update, so the copies stay equal bit by
    bit. The first stage speaks for all: in the gradient norm, exports and checkpoints.
    """

    def __init__(self, stages: Mapping[str, Sequence[int]]) -> None:
        """Make the groups. Every rank calls it, with the same stages.

        Args:
            stages: Name of a set of stages -> the stages, ascending.
        """
        pipelines: list[Any] = [None] * dist.get_world_size()
        own = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        dist.all_gather_object(pipelines, own)
        self._stages = stages
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._held: dict[str, list[torch.Tensor]] = {name: [] for name in stages}
        self._groups: dict[str, dist.ProcessGroup] = {}
        for name, members in stages.items():
            for ranks in sorted(set(map(tuple, pipelines))):
                group = dist.new_group([ranks[stage] for stage in members])
                if list(ranks) == own and self._stage in members:
                    self._groups[name] = group

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the group of the stages `name` in this rank's pipeline."""
        return self._groups[name]

    def share(self, parameter: torch.Tensor, name: str) -> None:
        """Note a parameter that all stages `name` hold."""
        if len(self._stages[name]) == 1:
            return
        # Megatron leaves parameters with this mark out of the gradient norm, ...
        parameter.shared = self._copy_number(name) > 0  # type: ignore[attr-defined]
        # ... and gives those with this one a bucket each: a distributed optimizer then cuts all
        # copies alike, so that they can be summed after they were reduced over the replicas.
        parameter.shared_embedding = True  # type: ignore[attr-defined]
        self._held[name].append(parameter)

    def entry(self, entry: ShardedTensor, name: str) -> ShardedTensor:
        """Return a checkpoint's entry of a shared parameter, as this stage's copy."""
        _, *others = entry.replica_id
        return replace(entry, replica_id=(self._copy_number(name), *others))

    def _copy_number(self, name: str) -> int:
        return list(self._stages[name]).index(self._stage)

    def finalizer(self) -> Callable[..., None]:
        """Return Megatron's function that ends a backward pass, which sums up the copies too."""

        def finalize(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
            finalize_model_grads(model, *args, **kwargs)
            # In one order on all stages, whatever each built first: a stage in two sets would
            # else wait for one that waits for it.
            for name, held in self._held.items():
                for parameter in held:
                    if parameter.requires_grad:
                        dist.all_reduce(parameter.main_grad, group=self._groups[name])  # type: ignore[attr-defined]

        return finalize
