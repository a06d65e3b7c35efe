"""Attention over blocks of queries is the softmax written out, and keeps no scores."""

from __future__ import annotations

import pytest
import torch

from accelerate_megatron.engine import block_attention as blocks


def inputs_of(
    heads: int, groups: int, queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return queries, keys and values laid out as the engine hands them on: sequence first."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(length, 2, count, 16, generator=generator)
        .to(dtype)
        .permute(1, 2, 0, 3)
        .requires_grad_()
        for count, length in ((heads, queries), (groups, keys), (groups, keys))
    ]


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * 0.25
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(
    ("groups", "queries", "keys"),
    [(4, 40, 40), (2, 40, 40), (4, 20, 50), (2, 1, 33)],
    ids=["blocks", "grouped", "the-last-queries", "one-query"],
)
def test_it_is_the_softmax_written_out_also_over_several_blocks(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, groups: int, queries: int, keys: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCKS", {64: 16})
    monkeypatch.setattr(blocks, "SCORES", 3 * 16 * keys)  # the heads of a batch in parts, too
    mine, plain = inputs_of(4, groups, queries, keys), inputs_of(4, groups, queries, keys)

    context = blocks.block_attention(*mine, scale=0.25, is_causal=is_causal)
    expected = written_out(*plain, is_causal=is_causal)

    torch.testing.assert_close(context, expected, atol=1e-6, rtol=1e-5)
    context.sin().sum().backward()
    expected.sin().sum().backward()
    for x, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(x.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_in_half_precision_it_is_as_far_from_the_exact_context_as_attention_written_out() -> None:
    exact = written_out(*(x.double() for x in inputs_of(4, 4, 300, 300)), is_causal=True)
    half = inputs_of(4, 4, 300, 300, torch.bfloat16)

    context = blocks.block_attention(*half, scale=0.25, is_causal=True)
    plain = written_out(*half, is_causal=True)

    def error(x: torch.Tensor) -> float:
        return (x.double() - exact).abs().mean().item()

    assert error(context) < 1.2 * error(plain)


def test_it_keeps_nothing_but_what_it_was_given() -> None:
    q, k, v = inputs_of(4, 2, 64, 64)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        blocks.block_attention(q, k, v, scale=0.25, is_causal=True)

    assert set(kept) == {x.untyped_storage().data_ptr() for x in (q, k, v)}
