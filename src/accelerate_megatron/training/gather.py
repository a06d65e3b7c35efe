"""Tensors over the data-parallel ranks: `Accelerator.gather` and its kin, and means for steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply

from accelerate_megatron import engine
from accelerate_megatron.errors import ConfigurationError, UnsupportedError

_LARGEST_DIM = 16
"""Of tensors that can be gathered."""


def gather_rows(tensors: Any, group: dist.ProcessGroup) -> Any:
    """Concatenate each tensor's rows over the ranks of a data-parallel group, in rank order.

    Tensor- and pipeline-parallel ranks work on the same samples, so theirs would be
    duplicates. All ranks of the group call it and get the same result. Ranks may have
    different numbers of rows; the other dims must agree. A scalar counts as one row.

    Args:
        tensors: A tensor, or lists, tuples and dicts of them; None, as logits are before the last
            stage, stays None.
        group: The data-parallel group.

    Raises:
        ConfigurationError: Other dims differ; alike on all ranks of the group.
        UnsupportedError: Something else is among them, of which each rank would keep its own.
    """

    def gather(item: Any) -> Any:
        if item is None:
            return None
        if not isinstance(item, torch.Tensor):
            raise UnsupportedError(
                f"gather got a {type(item).__name__}, and collects tensors. Make it one, or take "
                "torch.distributed.all_gather_object, which collects over all ranks."
            )
        return _gather_one(item, group)

    return recursively_apply(gather, tensors, test_type=lambda _item: True)


def _gather_one(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rows = (tensor.reshape(1) if tensor.dim() == 0 else tensor).contiguous()
    shapes = _all_shapes(rows, group)
    if len({shape[1:] for shape in shapes}) > 1:
        raise ConfigurationError(
            "A tensor to gather has rows of different shapes on different ranks: "
            f"{', '.join(str(list(shape[1:])) for shape in shapes)}. Pad them with "
            "accelerator.pad_across_processes; batches have one length with "
            "MegatronLMPlugin(seq_length=...)."
        )
    sizes = [shape[0] for shape in shapes]
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])


def _all_shapes(rows: torch.Tensor, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Return each rank's shape of `rows`, in rank order."""
    described = [rows.dim(), *rows.shape, *[0] * _LARGEST_DIM][: _LARGEST_DIM + 1]
    mine = torch.tensor(described, device=rows.device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    return [tuple(shape[1 : 1 + shape[0]]) for shape in (each.tolist() for each in gathered)]


def pad_rows(
    tensors: Any, group: dist.ProcessGroup, *, dim: int, value: Any, at_the_front: bool
) -> Any:
    """Pad each tensor along `dim` to the largest size on a rank of a data-parallel group.

    All ranks of the group call it. What is no tensor, or has no such dim, stays as it is: the
    ranks of a group have logits or None alike.
    """

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor
        sizes = list(tensor.shape)
        sizes[dim] = max(shape[dim] for shape in _all_shapes(tensor, group)) - sizes[dim]
        padding = tensor.new_full(sizes, value)
        return torch.cat([padding, tensor] if at_the_front else [tensor, padding], dim)

    return recursively_apply(pad, tensors)


def cut_filler_rows(tensors: Any, num_rows: int, num_real_rows: int) -> Any:
    """Drop the rows that only fill up a short batch.

    Args:
        tensors: A tensor, or lists, tuples and dicts of them.
        num_rows: Rows of this rank's batch; a tensor with another number is left alone.
        num_real_rows: How many of them, from the first, are samples.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        is_per_row = tensor.dim() > 0 and tensor.shape[0] == num_rows
        return tensor[:num_real_rows] if is_per_row else tensor

    return recursively_apply(cut, tensors)


def reduce_tensors(tensors: Any, group: dist.ProcessGroup, reduction: str, scale: float) -> Any:
    """Add or average each tensor over a data-parallel group; all its ranks call it.

    Raises:
        ConfigurationError: `reduction` is none of the three words.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ConfigurationError(f"reduction is {reduction!r}; it must be sum, mean or none.")

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        if reduction == "none":
            return tensor * scale
        total = tensor.detach().clone()
        dist.all_reduce(total, group=group)
        return (total / group.size() if reduction == "mean" else total) * scale

    return recursively_apply(reduce, tensors, error_on_other_type=True)


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of each loss over the data-parallel ranks, in one tensor.

    Every rank of a data-parallel group calls it with the same number of losses and gets
    the same result. To be called inside a train step's loss function.

    Args:
        losses: Scalar tensors.
    """
    stacked = torch.cat([loss.detach().clone().view(1) for loss in losses])
    return engine.mean_over_data_parallel(stacked)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Concatenate rows over the data-parallel ranks, in rank order; all of them call it.

    Args:
        tensor: A tensor, or lists, tuples and dicts of them; a scalar counts as one row.
    """
    return gather_rows(tensor, engine.data_parallel_group())
