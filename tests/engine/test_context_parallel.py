"""Slices of a sequence, and core attention over them, against one rank with the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron import engine
from tests.helpers.ranks import run_ranks

HEADS, GROUPS, CHANNELS, ROWS, LENGTH = 4, 2, 8, 2, 16


def test_a_rank_takes_one_chunk_from_the_front_and_one_from_the_back() -> None:
    tokens = torch.arange(16).reshape(1, 16)

    slices = [engine.take_slice(tokens, dim=1, rank=rank, size=2)[0].tolist() for rank in (0, 1)]

    assert slices == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"10 tokens .* must be a multiple of 4"):
        engine.take_slice(torch.zeros(1, 10), dim=1, rank=0, size=2)


def test_gathering_undoes_slicing_and_hands_gradients_back() -> None:
    for both in run_ranks(gather_there_and_back, num_ranks=4):
        for whole, wanted, grad, wanted_grad in both:
            assert torch.equal(whole, wanted)
            assert torch.equal(grad, wanted_grad)


def gather_there_and_back() -> list[tuple[torch.Tensor, ...]]:
    layout = context_layout(4)
    ranks = engine.start_groups(layout, None)
    wanted = torch.arange(16.0).reshape(16, 1)
    results = []
    for partial, factor in ((True, 4.0), (False, 1.0)):
        mine = engine.take_slice(wanted, dim=0, rank=ranks.cp_rank, size=4).requires_grad_()
        whole = engine.gather_sequence(mine, ranks.cp_group, grads_are_partial=partial)
        (whole * wanted).sum().backward()
        assert mine.grad is not None
        results.append((whole.detach(), wanted, mine.grad, factor * mine.detach()))
    return results


def context_layout(size: int, world_size: int | None = None) -> Any:
    from accelerate_megatron.config.layout import Layout

    return Layout(world_size=world_size or size, cp_size=size)


CASES = {
    "causal": {},
    "causal-window": {"window": 5},
    "bidirectional": {"causal": False},
    "padding": {"masked": True},
    "padding-window": {"masked": True, "window": 5},
    "bidirectional-padding": {"masked": True, "causal": False},
}


@pytest.mark.parametrize("communication", ["all_gather", "a2a"])
@pytest.mark.parametrize("case", CASES)
def test_attention_over_ranks_equals_attention_over_the_whole(
    case: str, communication: str
) -> None:
    for results in run_ranks(attend_both_ways, CASES[case], communication, num_ranks=2):
        for name, mine, wanted in results:
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5, msg=name)


def attend_both_ways(
    case: dict[str, Any], communication: str
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Attend over two ranks and over one; return output and gradients of this rank's tokens."""
    ranks = engine.start_groups(context_layout(2), None)
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(LENGTH, ROWS, heads, CHANNELS, generator=generator)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    weight = torch.randn(LENGTH, ROWS, HEADS * CHANNELS, generator=generator)
    mask = padding_mask(causal=case.get("causal", True)) if case.get("masked") else None

    def run(inputs: list[torch.Tensor], factor: torch.Tensor, cp: int) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_() for x in inputs]
        output = attention(case, cp, communication)(*inputs, mask)
        (output * factor).sum().backward()
        return [output.detach(), *[x.grad for x in inputs if x.grad is not None]]

    def part(x: torch.Tensor) -> torch.Tensor:
        return engine.take_slice(x, dim=0, rank=ranks.cp_rank, size=2)

    mine = run([part(x) for x in whole], part(weight), 2)
    wanted = [part(x) for x in run(whole, weight, 1)]
    names = ("output", "query", "key", "value")
    return list(zip(names, mine, wanted, strict=True))


def padding_mask(*, causal: bool) -> torch.Tensor:
    """Bool [b, 1, s, s], True = hidden: row 1 has three tokens of padding on the right."""
    hidden = torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)
    hidden[1, :, :, -3:] = True
    if causal:
        hidden |= torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return hidden


def attention(case: dict[str, Any], cp: int, communication: str) -> torch.nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from accelerate_megatron.engine.attention import SdpaCoreAttention
    from accelerate_megatron.engine.model_config import ModelConfig

    window = case.get("window")
    config = ModelConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        context_parallel_size=cp,
        attention_dropout=0.0,
        attention_windows=(window,) if window else (),
    )
    return SdpaCoreAttention(
        config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal if case.get("causal", True) else AttnMaskType.no_mask,
        attention_type="self",
        cp_comm_type=communication,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
    )
