"""The core attention of the layer spec: torch's scaled dot product attention, or another one."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right

from accelerate_megatron.engine.block_attention import block_attention, prefers_blocks
from accelerate_megatron.engine.context_parallel import (
    chunks_with_bounds,
    gather_sequence,
    heads_for_tokens,
    tokens_for_heads,
)
from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.engine.unfused_attention import causal_hidden, unfused_attention


class SdpaCoreAttention(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """Softmax(q k^T * scale) v for the heads of one tensor-parallel rank.

    Megatron's own `DotProductAttention` without Transformer Engine materialises the
    [b, heads, s, s] scores; torch's fused kernels do not. `attention_backend="unfused"` does.
    """

    def __init__(  # noqa: PLR0913  # the signature is Megatron's
        self,
        config: ModelConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Take the arguments that Megatron's `Attention` gives a core attention.

        `layer_number` counts from 1 over the whole model.
        """
        super().__init__(config=config)
        scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.scale = scale / layer_number if config.apply_query_key_layer_scaling else scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = config.attention_window(layer_number)
        self.cp_group = (
            pg_collection.cp if pg_collection and config.context_parallel_size > 1 else None
        )
        self.cp_comm_type = cp_comm_type
        self.is_causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> torch.Tensor:
        """Return the context, [s, b, heads / tp * head_dim].

        Args:
            query: [s, b, heads / tp, head_dim].
            key: [s, b, groups / tp, head_dim].
            value: Like `key`.
            attention_mask: Bool [b or 1, 1, s, s], True where a query must not look, or a float
                [b or 1, heads / tp, s, s] that is added to the scores. It is the whole mask but
                for the layer's window. None: the layer's kind of mask decides, causal or all.
            attn_mask_type: Not used: the kind given at construction holds.
            attention_bias: Not used by the families we build.
            packed_seq_params: Must be None.

        Under context parallelism s is this rank's part of the sequence, as in
        `context_parallel`; the mask's is the whole sequence's.

        Raises:
            ValueError: `packed_seq_params` is given.
        """
        if packed_seq_params is not None:
            raise ValueError(
                "Packed sequences came as packed_seq_params, which this core attention does not "
                "read; hide documents from each other with an attention mask [b, 1, s, s]."
            )
        if not self.training or self.dropout == 0.0 or self.config.sequence_parallel:
            # Under sequence parallelism the whole layer already runs in the forked state.
            context = self._over_ranks(query, key, value, attention_mask)
        else:
            # Each tensor-parallel rank has other heads, so it drops other scores.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                context = self._over_ranks(query, key, value, attention_mask)
        return context.flatten(2)

    def _over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend over the tokens of all context-parallel ranks; [s, b, heads, head_dim]."""
        group = self.cp_group
        if group is None:
            return self._attend(query, key, value, mask)
        if self.cp_comm_type == "a2a":
            query, key, value = (heads_for_tokens(x, group) for x in (query, key, value))
            return tokens_for_heads(self._attend(query, key, value, mask), group)
        # One message for both; each rank's queries add to the gradients of all keys.
        both = gather_sequence(torch.cat([key, value], dim=-1), group, grads_are_partial=True)
        channels = key.shape[-1]
        key, value = both[..., :channels], both[..., channels:]
        contexts = []
        for chunk, start, end in chunks_with_bounds(query, group):
            seen = end if self.is_causal else key.shape[0]
            part = None if mask is None else mask[:, :, start:end, :seen]
            contexts.append(self._attend(chunk, key[:seen], value[:seen], part, first_query=start))
        return torch.cat(contexts)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        first_query: int | None = None,
    ) -> torch.Tensor:
        """Attend on this rank alone; sequence first, in and out.

        Args:
            query: [queries, b, heads, head_dim].
            key: [keys, b, groups, head_dim].
            value: Like `key`.
            mask: Bool [b or 1, 1, queries, keys], True = hidden, or a float to be added to the
                scores, or None.
            first_query: Place of the first query among the keys; None: the queries are last.
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        queries, keys = q.shape[2], k.shape[2]
        first = keys - queries if first_query is None else first_query
        mask = self._windowed(mask, first, queries, keys, q.device)
        if self.config.attention_kernel == "unfused":
            return self._attend_unfused(q, k, v, mask)
        dropout = self.dropout if self.training else 0.0
        if (
            self.config.attention_kernel == "auto"
            and mask is None
            and dropout == 0.0
            and prefers_blocks(q, k, v, is_causal=self.is_causal)
        ):
            return block_attention(q, k, v, scale=self.scale, is_causal=self.is_causal)
        is_causal = mask is None and self.is_causal and queries > 1
        bias = ~mask if mask is not None and mask.dtype == torch.bool else mask
        if is_causal and queries != keys:
            is_causal = False
            bias = _lower_right(queries, keys, q.device)
            if q.device.type == "cuda":  # torch's kernels for such a bias know no grouped heads
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        width = v.shape[-1]
        if q.device.type == "cpu":
            q, k, v = _equally_wide(q, k, v)
        context = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return context[..., :width].permute(2, 0, 1, 3)

    def _attend_unfused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend by matrix products; q, k, v are [b, heads or groups, s, head_dim]."""
        if mask is None and self.is_causal:
            mask = causal_hidden(q.shape[2], k.shape[2], q.device)
        context = unfused_attention(
            *(q, k, v, mask),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            softmax_in_fp32=self.config.attention_softmax_in_fp32,
        )
        return context.permute(2, 0, 1, 3)

    def _windowed(
        self, mask: torch.Tensor | None, first: int, num_queries: int, num_keys: int, device: Any
    ) -> torch.Tensor | None:
        """Return `mask` with the keys hidden that the layer's window does not reach.

        The first query is the token at `first` of the keys. Under a window of w, a token looks
        at w tokens, itself included.
        """
        if self.window is None or num_keys <= self.window:
            return mask
        queries = torch.arange(first, first + num_queries, device=device).unsqueeze(1)
        keys = torch.arange(num_keys, device=device)
        hidden = keys <= queries - self.window
        if mask is None:
            return hidden | (keys > queries) if self.is_causal else hidden
        return mask | hidden


def _equally_wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors [..., channels] with as many channels as the widest, the last ones zero.

    Zeros add nothing to a score. torch's kernel for the CPU that keeps no scores wants keys and
    values equally wide; for others torch falls back to one that keeps all of them.
    """
    widest = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(t, (0, widest - t.shape[-1])) if t.shape[-1] < widest else t for t in tensors]


def _lower_right(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return a causal bias in which the last query is the last key, True = seen."""
    if device.type == "cuda":
        # A marker, of which torch makes no tensor where a kernel knows this form.
        marker: torch.Tensor = causal_lower_right(queries, keys)
        return marker
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
