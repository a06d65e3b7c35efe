"""Means and collections over the data-parallel ranks, for users' steps and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accelerate_megatron import engine
from accelerate_megatron.training.gather import gather_rows


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
