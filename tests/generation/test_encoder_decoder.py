"""A T5 answers with the tokens of transformers' `generate`, whatever stages hold its encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron.generation.sampling import SamplingRule, draw, probabilities, uniforms
from tests.generation.calling import LAYOUTS, Batch, generated, prompts, reference, refusals
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel

V1_0 = TinyModel("t5")
V1_1 = TinyModel("t5", tied=False, changes={"feed_forward_proj": "gated-gelu"})
PAD, START = 2, 3
GREEDY = {"max_new_tokens": 16}
BEAMS = {"max_new_tokens": 16, "num_beams": 4, "length_penalty": 1.5}
SAMPLED = {"max_new_tokens": 12, "temperature": 1.2, "top_p": 0.9, "seed": 11}
SPLIT = {"pipeline_model_parallel_split_rank": 1}
STAGES = {
    **{
        name: (ranks, {**plugin, **SPLIT} if "pp_degree" in plugin else plugin)
        for name, (ranks, plugin) in LAYOUTS.items()
    },
    "two-encoder-stages": (3, {"pp_degree": 3, "pipeline_model_parallel_split_rank": 2}),
    "two-decoder-stages": (3, {"pp_degree": 3, **SPLIT}),
    "tp2-sp": (2, {"tp_degree": 2, "sequence_parallelism": True}),
}

Call = tuple[Batch, dict[str, Any]]


def compared_calls() -> list[Call]:
    """Return both paddings and then each prompt alone, each greedily and with beams."""
    padded = [prompts(3, 7, side=side) for side in ("left", "right")]
    rows = [row[keep.bool()] for row, keep in zip(*padded[0], strict=True)]
    alone = [(row[None], torch.ones(1, len(row), dtype=torch.int64)) for row in rows]
    return [(batch, asked) for batch in (*padded, *alone) for asked in (GREEDY, BEAMS)]


def sampled_by_hand(recipe: TinyModel, batch: Batch) -> torch.Tensor:
    """Return what the numbers of the seed draw from transformers' logits, without a cache."""
    model, rows = recipe.build().eval(), len(batch[0])
    numbers = uniforms(SAMPLED["seed"], 0, rows, SAMPLED["max_new_tokens"])
    rule = SamplingRule(temperature=SAMPLED["temperature"], top_p=SAMPLED["top_p"])
    tokens = torch.full((rows, 1), START)
    for step in range(SAMPLED["max_new_tokens"]):
        with torch.no_grad():
            output = model(batch[0], attention_mask=batch[1], decoder_input_ids=tokens)
        drawn = draw(probabilities(output.logits[:, -1], rule), numbers[:, step])
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    return tokens


def check(recipe: TinyModel, layout: str) -> None:
    """Compare every call on every rank with transformers, and a prompt alone with its batch."""
    num_ranks, plugin = STAGES[layout]
    calls = compared_calls()
    drawn = (prompts(3, 7), {**SAMPLED, "eos_token_id": []})

    results = run_ranks(generated, recipe, plugin, [*calls, drawn], num_ranks=num_ranks)

    wanted = [reference(recipe, batch, **{**asked, "pad_token_id": PAD}) for batch, asked in calls]
    wanted.append(sampled_by_hand(recipe, drawn[0]))
    for tokens in results:
        assert all(torch.equal(a, b) for a, b in zip(tokens, wanted, strict=True))
    for way in range(2):
        for row, alone in enumerate((results[0][4 + way], results[0][6 + way])):
            for batch in (results[0][way], results[0][2 + way]):
                assert torch.equal(batch[row, : alone.shape[1]], alone[0])
                assert (batch[row, alone.shape[1] :] == PAD).all()


def test_tokens_are_those_of_transformers_on_tp2_pp2() -> None:
    check(V1_1, "tp2-pp2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.parametrize("recipe", [V1_0, V1_1], ids=["v1.0", "v1.1"])
def test_tokens_are_those_of_transformers(recipe: TinyModel, layout: str) -> None:
    check(recipe, layout)


@pytest.mark.slow
def test_an_mt5_answers_like_transformers() -> None:
    check(TinyModel("mt5", tied=False, changes={"feed_forward_proj": "gated-gelu"}), "pp2")


def test_first_tokens_that_do_not_fit_are_refused() -> None:
    batch = prompts(3, 7)
    without = TinyModel("t5", changes={"decoder_start_token_id": None})
    calls = [
        (batch, {**GREEDY, "add_BOS": True}),
        (batch, {"max_length": 1, "decoder_start_token_id": 5}),
        (batch, {"max_length": 9, "max_new_tokens": 9, "decoder_start_token_id": 5}),
        (batch, GREEDY),
    ]

    [told] = run_ranks(refusals, without, {}, calls, num_ranks=1)

    for text, expected in zip(
        told,
        (
            "add_BOS is True, which is for models without an encoder",
            "max_length is 1, but the decoder's rows begin with token 5",
            "but the decoder's rows begin with token 5: 1 + 9 is 10",
            "The model's config has no decoder_start_token_id; give one.",
        ),
        strict=True,
    ):
        assert expected in text
