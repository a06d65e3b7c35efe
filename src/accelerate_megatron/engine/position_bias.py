"""Relative positions: a learned number for each head and distance, added to attention scores."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from accelerate_megatron.engine.model_config import ModelConfig


class RelativePositionBias(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """The numbers of one stack's heads, of which a tensor-parallel rank holds those of its own.

    Megatron's own module holds all heads on every rank. Cut like the heads, a rank needs no
    other's gradient, and the norm counts each number once.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_buckets: int,
        max_distance: int,
        looks_ahead: bool,
        tp_group: dist.ProcessGroup,
    ) -> None:
        """Leave the numbers uninitialised.

        Args:
            config: The run in Megatron's terms.
            num_buckets: Distances with a number of their own.
            max_distance: From here on all distances share the last bucket.
            looks_ahead: Whether queries see later keys, which then have half of the buckets.
            tp_group: The ranks that share the heads.
        """
        super().__init__(config=config)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.looks_ahead = looks_ahead
        num_heads = config.num_attention_heads // tp_group.size()
        # The name of the parameter in Megatron's own module.
        self.relative_attention_bias = torch.nn.Embedding(
            num_buckets, num_heads, dtype=config.params_dtype
        )
        tensor_parallel.set_tensor_model_parallel_attributes(
            self.relative_attention_bias.weight, True, 1, 1
        )

    def forward(self, length: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return what is added to the scores, [1 or b, heads / tp, length, length].

        Args:
            length: Tokens of a row, of all sequence-parallel ranks together.
            hidden: Bool, broadcasts to [b, 1, length, length]; True where a query must not look.
        """
        places = self._places(length)
        bias = self._of(places - places.unsqueeze(1))
        if hidden is None:
            return bias.contiguous()
        # Not -inf: a row in which everything is hidden has to stay finite.
        return bias.masked_fill(hidden, torch.finfo(bias.dtype).min)

    def of_last_query(self, length: int) -> torch.Tensor:
        """Return what the last of `length` tokens adds to its scores, [1, heads / tp, 1, length].

        The last n columns are what token n - 1 adds, whatever the length.
        """
        places = self._places(length)
        return self._of(places[None] - places[-1]).contiguous()

    def _places(self, length: int) -> torch.Tensor:
        return torch.arange(length, device=self.relative_attention_bias.weight.device)

    def _of(self, distances: torch.Tensor) -> torch.Tensor:
        """Return [1, heads / tp, queries, keys], of places of keys less those of queries."""
        buckets = distance_buckets(
            distances,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            looks_ahead=self.looks_ahead,
        )
        bias: torch.Tensor = self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)
        return bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the entry of the numbers, cut along the heads."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"relative_attention_bias.weight": 1},
            sharded_offsets,
        )
        return state


def distance_buckets(
    distances: torch.Tensor, *, num_buckets: int, max_distance: int, looks_ahead: bool
) -> torch.Tensor:
    """Return the bucket of each distance, int64 like `distances`.

    Half of the buckets are for single distances, the others for ranges that grow with the
    logarithm up to `max_distance`.

    Args:
        distances: Place of the key less that of the query, integers.
        num_buckets: How many buckets there are.
        max_distance: From here on all distances are in the last bucket.
        looks_ahead: Whether keys behind the query have half of the buckets; else all are in the
            bucket of distance 0.

    Source: transformers 5.24, models/t5/modeling_t5.py, `T5Attention._relative_position_bucket`.
    """
    start = torch.zeros_like(distances)
    if looks_ahead:
        num_buckets //= 2
        start = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    num_single = num_buckets // 2
    # In fp32 and in this order, so that a distance at the edge falls on the same side.
    growth = torch.log(distances.float() / num_single) / math.log(max_distance / num_single)
    far = num_single + (growth * (num_buckets - num_single)).long()
    far = far.clamp(max=num_buckets - 1)
    return start + torch.where(distances < num_single, distances, far)
