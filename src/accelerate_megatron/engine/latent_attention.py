"""Multi-latent attention: queries, keys and values out of low-rank vectors.

Megatron-Core's own splits the down projections over tensor-parallel ranks and gathers their
output; the gather's backward pass takes each rank's slice of its own gradient, and that of the
position keys, which every rank has from its own heads, is never added up (megatron-core 0.16.1).
Here the down projections are replicated, as Transformer Engine's layers have them there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.spec_utils import ModuleSpec

from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.engine.norm import Norm
from accelerate_megatron.models.latent import LatentAttention

NORM_BEFORE_ATTENTION = "input_layernorm."
"""The prefix that Megatron's local spec renames, as if the norm were fused into `linear_qkv`."""


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank has whole.

    Under sequence parallelism a rank applies it to its part of the sequence, so the gradient
    of the weight is a partial sum; the mark makes Megatron's `finalize_model_grads` add it up.
    """

    def __init__(self, config: ModelConfig, in_channels: int, out_channels: int) -> None:
        super().__init__()
        weight = torch.empty(out_channels, in_channels, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_channels] to [..., out_channels]."""
        return F.linear(x, self.weight)


class LatentSelfAttention(Attention):  # type: ignore[misc]  # megatron is untyped
    """Megatron's attention with queries, keys and values from low-rank vectors.

    The channels that carry positions stand first in queries and keys, where Megatron turns
    them; scores do not depend on the order of channels.
    """

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        """Take what Megatron gives a self-attention; `config.latent` says the sizes."""
        super().__init__(config=config, attention_type="self", **settings)
        latent = self.latent
        heads = config.num_attention_heads
        query_channels = heads * latent.key_channels
        # Megatron's forward pass asks whether there are these.
        self.q_layernorm: Any = None
        self.k_layernorm: Any = None
        if latent.query_rank is None:
            self.linear_q_proj = self._split_over_heads(config.hidden_size, query_channels)
        else:
            self.linear_q_down_proj = self._replicated(latent.query_rank)
            self.q_layernorm = Norm(config, latent.query_rank, eps=latent.norm_epsilon)
            self.linear_q_up_proj = self._split_over_heads(latent.query_rank, query_channels)
        self.linear_kv_down_proj = self._replicated(
            latent.key_value_rank + latent.position_channels
        )
        self.kv_layernorm = Norm(config, latent.key_value_rank, eps=latent.norm_epsilon)
        self.linear_kv_up_proj = self._split_over_heads(
            latent.key_value_rank, heads * (latent.content_channels + config.kv_channels)
        )

    @property
    def latent(self) -> LatentAttention:
        """The sizes."""
        latent: LatentAttention = self.config.latent
        return latent

    def _replicated(self, channels: int) -> ReplicatedLinear:
        return ReplicatedLinear(self.config, self.config.hidden_size, channels)

    def _split_over_heads(self, in_channels: int, out_channels: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            in_channels,
            out_channels,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query and key [s, b, heads / tp, key_channels], value [s, b, heads / tp, kv].

        Args:
            hidden_states: [s, b, h], or [s / tp, b, h] under sequence parallelism.
            key_value_states: Of a cross attention, which this is not.
        """
        sizes = self.latent
        query = self._by_head(self._query(hidden_states))
        down = self.linear_kv_down_proj(hidden_states)
        compressed, position = torch.split(
            down, [sizes.key_value_rank, sizes.position_channels], dim=-1
        )
        up = self._by_head(self.linear_kv_up_proj(self.kv_layernorm(compressed))[0])
        content, value = torch.split(up, [sizes.content_channels, self.config.kv_channels], dim=-1)
        position = self._turnable(self._for_all_heads(position)).unsqueeze(2)
        key = torch.cat([position.expand(*content.shape[:3], -1), content], dim=-1)
        content, position = torch.split(
            query, [sizes.content_channels, sizes.position_channels], dim=-1
        )
        query = torch.cat([self._turnable(position), content], dim=-1)
        return query, key, value

    def _query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [s, b, heads / tp * key_channels]."""
        query: torch.Tensor
        if self.latent.query_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            compressed = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _ = self.linear_q_up_proj(compressed)
        return query

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], self.num_attention_heads_per_partition, -1)

    def _for_all_heads(self, position: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence's position keys; gradients of all ranks' heads are added."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            whole: torch.Tensor = gather_from_sequence_parallel_region(position, group=group)
            return whole
        same: torch.Tensor = copy_to_tensor_model_parallel_region(position, group=group)
        return same

    def _turnable(self, position: torch.Tensor) -> torch.Tensor:
        """Return the channels in Megatron's order: the first of all pairs, then the second."""
        if self.latent.interleaved:
            position = torch.cat([position[..., 0::2], position[..., 1::2]], dim=-1)
        scale = self.latent.position_scale
        return position if scale == 1.0 else position * scale


def use_latent_attention(layer: ModuleSpec) -> None:
    """Give a layer's spec latent attention in place of its own."""
    layer.submodules.self_attention.module = LatentSelfAttention
    layer.submodules.sharded_state_dict_keys_map.pop(NORM_BEFORE_ATTENTION)
