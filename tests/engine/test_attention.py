"""The core attention is the softmax written out, for every mask, scale and grouping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.training.start import start


def attend(
    recipe: TinyModel, layer: int, inputs: tuple[torch.Tensor, ...], mask: torch.Tensor | None
) -> Any:
    """Run one layer's core attention forward and backward; return the largest saved tensor too."""
    chunk: Any = start(recipe).model.chunks[0]
    while hasattr(chunk, "module"):
        chunk = chunk.module
    core = chunk.decoder.layers[layer].self_attention.core_attention
    leaves = [value.clone().requires_grad_() for value in inputs]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        context = core(*leaves, mask)
    context.sin().sum().backward()
    return context.detach(), [leaf.grad for leaf in leaves], max(saved)


def written_out(
    inputs: tuple[torch.Tensor, ...], hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [value.clone().requires_grad_() for value in inputs]
    q, k, v = (leaf.permute(1, 2, 0, 3) for leaf in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)  # a query that sees nothing
    context = (weights @ v).permute(2, 0, 1, 3).flatten(2)
    context.sin().sum().backward()
    return context.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def inputs_of(heads: int, groups: int, length: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(
        torch.randn(length, 2, count, 16, generator=generator) for count in (heads, groups, groups)
    )


def check_gradients(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Compare gradients: each element is a sum of terms that may be far larger than itself."""
    for ours, theirs in zip(found, wanted, strict=True):
        largest = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-6 * largest)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)


def left_padding() -> torch.Tensor:
    mask = CAUSAL.repeat(2, 1, 1, 1)
    mask[1, :, :, :2] = True
    return mask


@pytest.mark.parametrize(
    ("recipe", "layer", "groups", "mask", "scale"),
    [
        (TinyModel("gpt2"), 0, 4, None, 1 / 4),
        (TinyModel("llama"), 0, 2, None, 1 / 4),
        (TinyModel("llama"), 1, 2, left_padding(), 1 / 4),
        (TinyModel("gpt2", changes={"scale_attn_by_inverse_layer_idx": True}), 2, 4, None, 1 / 12),
        (TinyModel("gpt2", changes={"scale_attn_weights": False}), 0, 4, None, 1.0),
    ],
    ids=["causal", "grouped", "left-padding", "by-layer", "unscaled"],
)
def test_it_is_the_softmax_written_out(
    recipe: TinyModel, layer: int, groups: int, mask: torch.Tensor | None, scale: float
) -> None:
    inputs = inputs_of(4, groups)

    ((context, gradients, _),) = run_ranks(attend, recipe, layer, inputs, mask, num_ranks=1)

    wanted, wanted_gradients = written_out(inputs, CAUSAL if mask is None else mask, scale)
    assert context.shape == (6, 2, 4 * 16)
    torch.testing.assert_close(context, wanted, rtol=1e-5, atol=1e-6)
    check_gradients(gradients, wanted_gradients)
    assert math.isfinite(sum(gradient.sum().item() for gradient in gradients))


@pytest.mark.parametrize(
    ("key_channels", "value_channels"), [(20, 16), (20, 24)], ids=["narrower", "wider"]
)
def test_values_of_another_width_than_the_keys_keep_no_scores(
    key_channels: int, value_channels: int
) -> None:
    length = 96
    generator = torch.Generator().manual_seed(2)
    widths = (key_channels, key_channels, value_channels)
    inputs = tuple(torch.randn(length, 1, 4, width, generator=generator) for width in widths)
    recipe = TinyModel("deepseek_v3", tied=False, changes={"v_head_dim": value_channels})

    ((context, gradients, largest),) = run_ranks(attend, recipe, 0, inputs, None, num_ranks=1)

    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    wanted, wanted_gradients = written_out(inputs, causal, key_channels**-0.5)
    assert largest <= length * 4 * max(widths)  # the scores are [1, 4, length, length]
    torch.testing.assert_close(context, wanted, rtol=1e-5, atol=1e-6)
    check_gradients(gradients, wanted_gradients)
