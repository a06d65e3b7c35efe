"""Attention as two matrix products, with the scores between them in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    dropout: float,
    softmax_in_fp32: bool,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v, [b, heads, queries, head_dim].

    Args:
        query: [b, heads, queries, head_dim].
        key: [b, groups, keys, head_dim]; each group serves heads / groups heads.
        value: Like `key`.
        mask: Broadcast to [b, heads, queries, keys]. Bool, True where a query must not look; one
            that may look nowhere gets zeros, as from torch's fused attention. Or a float, added.
        scale: Factor of the scores.
        dropout: Share of the probabilities that are dropped.
        softmax_in_fp32: False leaves the softmax in the dtype of the scores.
    """
    heads_per_group = query.shape[1] // key.shape[1]
    if heads_per_group > 1:
        key, value = (x.repeat_interleave(heads_per_group, dim=1) for x in (key, value))
    scores = query @ (key * scale).transpose(-1, -2)
    if softmax_in_fp32:
        scores = scores.float()
    hidden = mask if mask is not None and mask.dtype == torch.bool else None
    if hidden is not None:
        # The lowest number, not minus infinity: a row of those alone is NaN, backward too.
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    probabilities = scores.softmax(dim=-1)
    if hidden is not None:
        probabilities = probabilities.masked_fill(hidden, 0.0)
    return F.dropout(probabilities.to(value.dtype), dropout) @ value


def causal_hidden(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return where a query must not look when the last query is the last key; True = hidden."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).triu(
        num_keys - num_queries + 1
    )
