"""Which token comes next, from the logits of one. Pure torch; equal on every layout.

A token is drawn with one uniform number of its own, by the cumulative probabilities in the order
of the vocabulary. The numbers depend on seed, row and step only, so that neither the layout nor
the other rows of a batch have a say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SamplingRule:
    """How logits become the probabilities that are drawn from: in this order."""

    temperature: float = 1.0
    top_k: int = 0
    """The likeliest tokens that are kept, and those as likely as the last of them; 0: all."""
    top_p: float = 1.0
    """The likeliest tokens are kept, as few as reach this probability together; 1: all."""


def probabilities(logits: torch.Tensor, rule: SamplingRule) -> torch.Tensor:
    """Return what `rule` draws from, fp64 [b, vocabulary].

    Args:
        logits: [b, vocabulary], of any float dtype.
        rule: The rule.
    """
    scores = logits.double() / rule.temperature
    if 0 < rule.top_k < scores.shape[-1]:
        last_kept = scores.topk(rule.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < last_kept, -torch.inf)
    shares = scores.softmax(dim=-1)
    if rule.top_p >= 1.0:
        return shares
    ordered, order = shares.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= rule.top_p, 0.0)
    kept = torch.zeros_like(shares).scatter_(-1, order, kept)
    return kept / kept.sum(dim=-1, keepdim=True)


def draw(shares: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return one token for each row, int64 [b].

    Args:
        shares: Probabilities, fp64 [b, vocabulary].
        uniform: A number in [0, 1) for each row, fp64 [b].
    """
    ends = shares.cumsum(dim=-1)
    places = (uniform.to(ends.device) * ends[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(ends, places, right=True)
    # Where rounding puts the place at the very end: the last token that has a probability.
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(tokens, last).squeeze(1)


def uniforms(seed: int, first_row: int, num_rows: int, num_steps: int) -> torch.Tensor:
    """Return the numbers that rows draw their tokens with, fp64 [num_rows, num_steps].

    Args:
        seed: Of the call.
        first_row: Number of the first of these rows over all data-parallel ranks.
        num_rows: How many.
        num_steps: Numbers of each.
    """
    made = [
        torch.rand(num_steps, generator=_generator(seed, row), dtype=torch.float64)
        for row in range(first_row, first_row + num_rows)
    ]
    return torch.stack(made)


def _generator(seed: int, row: int) -> torch.Generator:
    # A large odd factor, so that (seed, row + 1) is not (seed + 1, row).
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + row) % 2**63)
