"""Which stages an encoder and a decoder can have, and which lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_megatron.config.encoder_decoder_rules import (
    encoder_decoder_length_problems,
    stack_lengths,
)
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.models.shape import ModelShape
from tests.config.shapes import shape
from tests.helpers.tiny_models import TinyModel


def t5(encoder: int = 6, decoder: int = 6) -> ModelShape:
    config = TinyModel(
        "t5", changes={"num_layers": encoder, "num_decoder_layers": decoder}
    ).config()
    return family_of(config).shape(config)


def problems(model: ModelShape, pp: int, split: int | None, **sizes: Any) -> list[str]:
    world = pp * sizes.get("cp_size", 1)
    layout = Layout(world_size=world, pp_size=pp, split_rank=split, **sizes)
    return layout.model_problems(model, 4)


@pytest.mark.parametrize(
    ("model", "pp", "split", "blocks"),
    [
        (t5(), 1, None, [6, 6]),
        (t5(), 2, 1, [6, 6]),
        (t5(), 4, 1, [6, 2, 2, 2]),
        (t5(), 4, 3, [2, 2, 2, 6]),
        (t5(2, 4), 4, 2, [1, 1, 2, 2]),
    ],
)
def test_the_layers_of_each_stack_are_split_over_its_own_stages(
    model: ModelShape, pp: int, split: int | None, blocks: list[int]
) -> None:
    assert problems(model, pp, split) == []
    layout = Layout(world_size=pp, pp_size=pp, split_rank=split)
    assert layout.layers_of_blocks(model) == blocks


@pytest.mark.parametrize(
    ("model", "pp", "split", "sizes", "part"),
    [
        (
            t5(4, 6),
            4,
            None,
            {},
            "pipeline_model_parallel_split_rank is not set and pp_degree is 4: it is the first "
            "stage with decoder layers, those before it have the encoder's. With pp_degree=4 it "
            "can be 1 or 2.",
        ),
        (t5(), 4, 0, {}, "is 0; it must be from 1 to 3"),
        (t5(), 4, 4, {}, "is 4; it must be from 1 to 3"),
        (t5(), 1, 1, {}, "is 1 but pp_degree is 1"),
        (
            t5(4, 6),
            4,
            3,
            {},
            "=3 gives the encoder 3 stages, which must divide its 4 layers. With pp_degree=4 it "
            "can be 1 or 2.",
        ),
        (t5(6, 4), 4, 1, {}, "=1 gives the decoder 3 stages, which must divide its 4 layers."),
        (t5(5, 7), 4, 2, {}, "With pp_degree=4 no number works: set pp_degree to 2"),
        (t5(), 2, 1, {"last_stage_layers": 2}, "decoder_last_pipeline_num_layers is 2"),
        (t5(), 2, 1, {"layers_per_virtual_stage": 1}, "num_layers_per_virtual_pipeline_stage is 1"),
        (t5(), 1, None, {"cp_size": 2}, "context_parallel_size is 2, and a t5 model cannot be"),
        (shape(), 2, 1, {}, "a llama model has none. Leave it out."),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_can(
    model: ModelShape, pp: int, split: int | None, sizes: dict[str, Any], part: str
) -> None:
    assert part in "".join(problems(model, pp, split, **sizes))


def plugin(**given: int) -> SimpleNamespace:
    names = ("seq_length", "encoder_seq_length", "decoder_seq_length")
    return SimpleNamespace(**(dict.fromkeys(names) | given))


def test_each_stack_has_a_length_of_its_own() -> None:
    layout = Layout(world_size=2, tp_size=2, sequence_parallel=True)
    given = plugin(encoder_seq_length=32, decoder_seq_length=16)

    assert encoder_decoder_length_problems(given, layout, t5()) == []
    assert stack_lengths(given) == (32, 16)
    assert stack_lengths(plugin(seq_length=8)) == (8, None)


@pytest.mark.parametrize(
    ("given", "model", "part"),
    [
        ({"decoder_seq_length": 15}, t5(), "decoder_seq_length=15 must be a multiple of tp_degree"),
        ({"encoder_seq_length": 8, "seq_length": 16}, t5(), "both are the length of the encoder's"),
        ({"encoder_seq_length": 8}, shape(), "a llama model is no encoder-decoder model"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    given: dict[str, int], model: ModelShape, part: str
) -> None:
    layout = Layout(world_size=2, tp_size=2, sequence_parallel=True)

    assert part in "".join(encoder_decoder_length_problems(plugin(**given), layout, model))
