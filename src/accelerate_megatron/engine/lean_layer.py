"""Megatron's decoder layers with nothing but what they compute, for one token at a time.

Megatron's own forward prepares, in Python, for recomputation, offloading, capture and a backward
pass, which takes longer than the products of one token. A `LeanLayer` sees the weights of one
layer and computes the same from them: nothing is copied.

Activations are rows [tokens, hidden]: of all prompts the first token, then of all the second, as
Megatron's [s, b, hidden] without its first border. A residual sum is part of the product before
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

from accelerate_megatron.engine.cpu_products import LinearProduct
from accelerate_megatron.engine.kv_cache import KeyValueCache, SelfCache, SourceCache

Transform = Callable[[torch.Tensor], torch.Tensor]
Part = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From normalised activations, the residual, and the number of rows, to their sum."""
Heads = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""From activations and the number of rows to what `SelfCache.attend` takes."""


class LeanLayer:
    """One layer of a decoder: norm, attention, sum, norm, MLP, sum."""

    def __init__(self, layer: Any, cache: KeyValueCache) -> None:
        """Take the weights of Megatron's `layer`, and room in the cache."""
        self._attention_norm = _norm(layer.input_layernorm)
        self._attention = _SelfAttention(layer.self_attention, cache)
        self._mlp_norm = _norm(layer.pre_mlp_layernorm)
        is_dense = type(layer.mlp) is MLP
        self._mlp: Part = _Mlp(layer.mlp) if is_dense else partial(_experts, layer.mlp)

    def __call__(self, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the layer's output, [tokens, hidden], of so many rows of the batch."""
        hidden = self._attention(self._attention_norm(hidden), hidden, rows)
        return self._mlp(self._mlp_norm(hidden), hidden, rows)


class LeanCrossLayer:
    """One layer of a decoder that also looks at what an encoder gave; reads single tokens."""

    def __init__(self, layer: Any, cache: KeyValueCache, encoded: torch.Tensor, rows: int) -> None:
        """Take the weights of Megatron's `layer`, and read what the encoder gave.

        Args:
            layer: The layer.
            cache: Where keys and values are kept, those of the encoder's tokens too.
            encoded: [s x b, hidden].
            rows: b.
        """
        self._attention_norm = _norm(layer.input_layernorm)
        self._attention = _SelfAttention(layer.self_attention, cache)
        self._cross_norm = _norm(layer.pre_cross_attn_layernorm)
        self._cross = _CrossAttention(layer.cross_attention, cache, encoded, rows)
        self._mlp_norm = _norm(layer.pre_mlp_layernorm)
        self._mlp = _Mlp(layer.mlp)

    def __call__(self, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the layer's output, [b, hidden], of one token in each of `rows` rows."""
        hidden = self._attention(self._attention_norm(hidden), hidden, rows)
        hidden = self._cross(self._cross_norm(hidden), hidden)
        return self._mlp(self._mlp_norm(hidden), hidden, rows)


class _SelfAttention:
    """Keys and values into the cache, and what the tokens see of it."""

    def __init__(self, attention: Any, cache: KeyValueCache) -> None:
        core = attention.core_attention
        self._cache = SelfCache(cache, scale=core.scale, window=core.window)
        self._output = _RowProduct(attention.linear_proj)
        self._heads: Heads = _packed_heads(attention) or partial(_any_heads, attention)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rows: int) -> torch.Tensor:
        heads, value = self._heads(x, rows)
        return self._output(self._cache.attend(heads, value), residual)


def _packed_heads(attention: Any) -> Heads | None:
    """Return what computes queries, keys and values where `linear_qkv` has all of a group's.

    None where it has not: low-rank vectors, or groups that several ranks share.
    """
    groups = attention.num_query_groups_per_partition
    num_ranks = attention.pg_collection.tp.size()
    if type(attention) is not SelfAttention or attention.config.num_query_groups < num_ranks:
        return None
    product = _column_product(attention.linear_qkv)
    queries = attention.num_attention_heads_per_partition // groups
    channels = attention.hidden_size_per_attention_head
    norms = None
    if attention.config.qk_layernorm:
        norms = _norm(attention.q_layernorm), _norm(attention.k_layernorm)

    def heads_of(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = product(x).view(-1, rows, groups, queries + 2, channels)
        heads, value = mixed.narrow(3, 0, queries + 1), mixed.select(3, queries + 1)
        if norms is not None:
            parts = torch.split(heads, [queries, 1], dim=3)
            heads = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=3)
        return heads, value

    return heads_of


def _any_heads(attention: Any, x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Let Megatron's attention compute queries, keys and values; see `SelfCache.attend`."""
    query, key, value = attention.get_query_key_value_tensors(x.view(-1, rows, x.shape[-1]), None)
    groups = key.shape[2]
    query = query.reshape(*query.shape[:2], groups, -1, query.shape[-1])
    return torch.cat([query, key.unsqueeze(3)], dim=3), value


class _CrossAttention:
    """What the tokens of a decoder see of the encoder's."""

    def __init__(
        self, attention: Any, cache: KeyValueCache, encoded: torch.Tensor, rows: int
    ) -> None:
        self._size = (
            attention.num_attention_heads_per_partition,
            attention.hidden_size_per_attention_head,
        )
        mixed = _column_product(attention.linear_kv)(encoded)
        heads, channels = self._size
        both = mixed.view(-1, rows, heads, 2 * channels).permute(1, 2, 0, 3)
        keys, values = both.chunk(2, dim=-1)
        self._cache = SourceCache(cache, keys, values, scale=attention.core_attention.scale)
        self._query = _column_product(attention.linear_q)
        self._output = _RowProduct(attention.linear_proj)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        heads, channels = self._size
        query = self._query(x).view(-1, heads, 1, channels)
        return self._output(self._cache.attend(query), residual)


class _Mlp:
    """Megatron's MLP: up, activation, down."""

    def __init__(self, mlp: Any) -> None:
        self._up = _column_product(mlp.linear_fc1)
        self._activation: Transform = mlp.activation_func
        self._is_gated = mlp.config.gated_linear_unit
        self._down = _RowProduct(mlp.linear_fc2)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, _rows: int) -> torch.Tensor:
        inner = self._up(x)
        if self._is_gated:
            gate, up = inner.chunk(2, dim=-1)
            return self._down(self._activation(gate) * up, residual)
        return self._down(self._activation(inner), residual)


def _experts(mlp: Any, x: torch.Tensor, residual: torch.Tensor, rows: int) -> torch.Tensor:
    """Let Megatron's mixture of experts compute, which may exchange tokens between ranks."""
    output, bias = mlp(x.view(-1, rows, x.shape[-1]))
    output = output.view_as(x) if bias is None else output.view_as(x) + bias
    added: torch.Tensor = residual + output
    return added


def _column_product(layer: Any) -> Transform:
    """Return what gives this rank's part of a linear layer's outputs, bias included."""
    return LinearProduct(layer.weight, layer.bias)


class _RowProduct:
    """A linear layer whose inputs are split over the tensor-parallel ranks, and a sum with it."""

    def __init__(self, layer: Any) -> None:
        self._group = layer.tp_group if layer.tp_group.size() > 1 else None
        self._product = LinearProduct(layer.weight, None if self._group else layer.bias)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual [tokens, hidden] plus the product of all ranks plus the bias."""
        if self._group is None:
            return self._product.plus(x, residual)
        total = self._product(x)
        dist.all_reduce(total, group=self._group)
        total.add_(residual)
        return total if self._bias is None else total.add_(self._bias)


def _norm(norm: torch.nn.Module) -> Transform:
    """Return what `norm` computes, without the calls around it."""
    if isinstance(norm, torch.nn.LayerNorm):
        return partial(
            F.layer_norm,
            normalized_shape=norm.normalized_shape,
            weight=norm.weight.detach(),
            bias=norm.bias.detach(),
            eps=norm.eps,
        )
    assert isinstance(norm, torch.nn.RMSNorm)
    return partial(
        F.rms_norm,
        normalized_shape=norm.normalized_shape,
        weight=norm.weight.detach(),
        eps=norm.eps,
    )
