"""Communication that NCCL does and gloo does otherwise, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron.engine.messages import SENT
from accelerate_megatron.engine.patches.patch import Patch, When

_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_MESSAGES = "megatron.core.pipeline_parallel.p2p_communication"


def _gather_uneven(upstream: Any) -> Callable[..., torch.Tensor]:
    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Gather pieces of `output_split_sizes` rows: all padded to the longest, then cut."""
        if output_split_sizes is None or group.size() == 1:
            whole: torch.Tensor = upstream(input_, group, output_split_sizes, use_global_buffer)
            return whole
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])

    return gather


def _reduce_scatter_uneven(upstream: Any) -> Callable[..., torch.Tensor]:
    def reduce_scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        """Sum over the group and return this rank's `input_split_sizes[rank]` rows."""
        if input_split_sizes is None or group.size() == 1:
            piece: torch.Tensor = upstream(input_, group, input_split_sizes, use_global_buffer)
            return piece
        sizes = [int(size) for size in input_split_sizes]
        total = input_.clone()
        dist.all_reduce(total, group=group)
        start = sum(sizes[: group.rank()])
        return total.narrow(0, start, sizes[group.rank()]).contiguous()

    return reduce_scatter


def _keep_what_is_sent(upstream: Any) -> Callable[..., dict[str, Any]]:
    def send_and_receive(**arguments: Any) -> dict[str, Any]:
        """Start what upstream starts; `run_schedule` waits for whatever was sent."""
        requests: dict[str, Any] = upstream(**arguments)
        for end in ("next", "prev"):
            if f"send_{end}" in requests:
                SENT.keep(requests[f"send_{end}"], arguments[f"tensor_send_{end}"])
        return requests

    return send_and_receive


_WHY = (
    "gloo refuses pieces of different lengths, which an MoE layer over expert-tensor-parallel "
    "ranks exchanges"
)
PATCHES = (
    Patch(
        module=_MESSAGES,
        symbol="_p2p_ops",
        parameters=(
            "tensor_send_prev",
            "tensor_recv_prev",
            "tensor_send_next",
            "tensor_recv_next",
            "group",
            "prev_pipeline_rank",
            "next_pipeline_rank",
        ),
        when=When.GLOO,
        replace=_keep_what_is_sent,
        why=(
            "an interleaved schedule drops its last requests without waiting, and gloo forgets "
            "a message whose request is dropped before the peer asks for it: the peer hangs"
        ),
    ),
    Patch(
        module=_MAPPINGS,
        symbol="_gather_along_first_dim",
        parameters=("input_", "group", "output_split_sizes", "use_global_buffer"),
        when=When.GLOO,
        replace=_gather_uneven,
        why=_WHY,
    ),
    Patch(
        module=_MAPPINGS,
        symbol="_reduce_scatter_along_first_dim",
        parameters=("input_", "group", "input_split_sizes", "use_global_buffer"),
        when=When.GLOO,
        replace=_reduce_scatter_uneven,
        why=_WHY,
    ),
)
