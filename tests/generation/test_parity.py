"""Greedy and beam tokens are those of transformers' `generate`, on every layout."""

from __future__ import annotations

import pytest
import torch

from tests.generation.calling import LAYOUTS, generated, prompts, reference
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel

GREEDY = {"max_new_tokens": 16}
BEAMS = {"max_new_tokens": 16, "num_beams": 4, "length_penalty": 1.5}


def without_padding(row: torch.Tensor, length: int, side: str, width: int = 7) -> torch.Tensor:
    """Return a prompt of `length` tokens and what was generated after it."""
    return row[width - length :] if side == "left" else row[: len(row) - (width - length)]


def check_family(family: str, layout: str) -> None:
    """Both ways and both paddings, and each prompt alone, in one job."""
    recipe, (num_ranks, plugin) = TinyModel(family), LAYOUTS[layout]
    if family == "mixtral" and "tp_degree" in plugin:  # a model with experts needs it
        plugin = {**plugin, "sequence_parallelism": True}
    lengths = (3, 7)
    calls = [
        (prompts(*lengths, side=side), asked)
        for side in ("left", "right")
        for asked in (GREEDY, BEAMS)
    ]
    calls += [((ids[None], None), asked) for ids in single_prompts() for asked in (GREEDY, BEAMS)]

    results = run_ranks(generated, recipe, plugin, calls, num_ranks=num_ranks)

    for rank in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank, results[0], strict=True))
    for got, (batch, asked) in zip(results[0][:2], calls[:2], strict=True):
        assert torch.equal(got, reference(recipe, batch, **asked))
    left, right, alone = results[0][:2], results[0][2:4], results[0][4:]
    for way in range(2):
        for row, length in enumerate(lengths):
            from_left = without_padding(left[way][row], length, "left")
            from_right = without_padding(right[way][row], length, "right")
            assert torch.equal(from_left, from_right)
            single = alone[2 * row + way][0]
            assert torch.equal(from_left[: len(single)], single)
            assert not from_left[len(single) :].any()


def single_prompts() -> list[torch.Tensor]:
    ids, mask = prompts(3, 7)
    return [row[row_mask.bool()] for row, row_mask in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mixtral"])
def test_tokens_are_those_of_transformers_on_tp2_pp2(family: str) -> None:
    check_family(family, "tp2-pp2")


def test_large_weights_give_the_tokens_of_transformers() -> None:
    sizes = {"n_embd": 256, "n_layer": 2, "vocab_size": 512, "initializer_range": 0.05}
    recipe = TinyModel("gpt2", changes=sizes)
    calls = [(prompts(*lengths), GREEDY) for lengths in ((7,), (3, 7))]

    [got] = run_ranks(generated, recipe, {}, calls, num_ranks=1)

    for tokens, (batch, asked) in zip(got, calls, strict=True):
        assert torch.equal(tokens, reference(recipe, batch, **asked))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mixtral"])
def test_tokens_are_those_of_transformers(family: str, layout: str) -> None:
    check_family(family, layout)
