"""From plugin and model to the layout and the shape that run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accelerate_megatron import MegatronLMPlugin
from accelerate_megatron.config.resolve import (
    check_precision,
    model_problems,
    resolve_layout,
    resolve_micro_batch_size,
    resolve_num_micro_batches,
    resolve_shape,
)
from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.encoder import Encoder
from accelerate_megatron.models.shape import ModelShape
from tests.config.shapes import shape


def test_the_plugins_sizes_become_the_layouts() -> None:
    plugin = MegatronLMPlugin(
        tp_degree=2,
        pp_degree=2,
        num_layers_per_virtual_pipeline_stage=1,
        sequence_parallelism=True,
    )

    layout = resolve_layout(plugin, 8)

    assert (layout.tp_size, layout.pp_size, layout.dp_size) == (2, 2, 2)
    assert layout.layers_per_virtual_stage == 1
    assert layout.sequence_parallel


def test_a_world_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="3 ranks cannot hold tp_degree=2"):
        resolve_layout(MegatronLMPlugin(tp_degree=2), 3)


@pytest.mark.parametrize(
    ("plugin", "embedding", "hidden", "attention"),
    [
        ({}, 0.3, 0.2, 0.1),
        ({"hidden_dropout": 0.5}, 0.5, 0.5, 0.1),
        ({"attention_dropout": 0.0}, 0.3, 0.2, 0.0),
    ],
    ids=["the model's", "hidden", "attention"],
)
def test_dropouts_are_the_models_unless_the_plugin_says_otherwise(
    plugin: dict[str, float], embedding: float, hidden: float, attention: float
) -> None:
    model = shape(embedding_dropout=0.3, hidden_dropout=0.2, attention_dropout=0.1)

    resolved = resolve_shape(model, MegatronLMPlugin(**plugin))

    assert resolved.embedding_dropout == embedding
    assert resolved.hidden_dropout == hidden
    assert resolved.attention_dropout == attention


def test_learned_positions_are_refused_for_a_model_without_a_table_of_them() -> None:
    plugin = MegatronLMPlugin(use_rotary_position_embeddings=False)

    with pytest.raises(UnsupportedError, match="is False, but a llama model has rope positions"):
        resolve_shape(shape(), plugin)


def test_forced_rotary_positions_turn_pairs_of_channels() -> None:
    model = shape(position_embedding="learned_absolute", rope_parameters={}, kv_channels=5)
    plugin = MegatronLMPlugin(use_rotary_position_embeddings=True)

    with pytest.raises(UnsupportedError, match="pairs of channels, of which each head has 5"):
        resolve_shape(model, plugin)
    forced = resolve_shape(replace(model, kv_channels=6), plugin)
    assert forced.position_embedding == "rope"
    assert forced.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("asked", [True, False])
def test_the_models_own_positions_may_be_named(asked: bool) -> None:
    model = shape(position_embedding="rope" if asked else "learned_absolute")

    assert resolve_shape(model, MegatronLMPlugin(use_rotary_position_embeddings=asked)) == model


def problems_of(model: ModelShape | None = None, **plugin: Any) -> list[str]:
    settings = MegatronLMPlugin(**plugin)
    return model_problems(
        resolve_layout(settings, 4), model or shape(), settings, settings.num_micro_batches
    )


def test_parts_that_no_layer_has_are_not_recomputed() -> None:
    parts = {"recompute_modules": ["core_attn", "mlp", "moe"]}
    asked = {"recompute_granularity": "selective", "other_megatron_args": parts}
    post_norm = shape(encoder=Encoder(token_types=2, norm_after=True, head="masked_lm"))
    norms = {**asked, "other_megatron_args": {"recompute_modules": ["layernorm"]}}

    (problem,) = problems_of(**asked)
    (of_norms,) = problems_of(post_norm, **norms)

    assert "recompute_modules has 'moe', and no layer of a llama model has such a part" in problem
    assert "recompute_modules has 'layernorm'" in of_norms
    assert problems_of(**norms) == []


def test_logits_of_an_encoder_without_a_head_are_refused() -> None:
    without = shape(encoder=Encoder(token_types=2, norm_after=True, head="none"))
    with_head = shape(encoder=Encoder(token_types=2, norm_after=True, head="masked_lm"))

    (problem,) = problems_of(without, return_logits=True)

    assert "return_logits is True" in problem
    assert problems_of(with_head, return_logits=True) == problems_of(without) == []


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    (problem,) = problems_of(seq_length=65)

    assert "seq_length=65 is longer than the model's 64 positions" in problem
    assert problems_of(seq_length=64) == []


def test_a_length_that_cannot_be_split_is_refused_with_its_neighbours() -> None:
    (problem,) = problems_of(seq_length=30, tp_degree=4, sequence_parallelism=True)

    assert "seq_length=30 must be a multiple of" in problem
    assert "28 or 32" in problem


@pytest.mark.parametrize(("smallest", "size"), [(True, 2), (False, 8)])
def test_the_micro_batch_is_the_smallest_or_largest_batch_size(smallest: bool, size: int) -> None:
    assert resolve_micro_batch_size([4, 2, 8], smallest=smallest) == size


def test_without_loaders_the_micro_batch_is_unknown() -> None:
    assert resolve_micro_batch_size([], smallest=True) is None


def test_a_precision_that_does_not_run_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"mixed_precision is 'fp8'; this version runs 'no'"):
        check_precision("fp8")


@pytest.mark.parametrize(("steps", "micro"), [(1, 8), (8, 1), (1, 1)])
def test_one_way_of_accumulating_is_enough(steps: int, micro: int) -> None:
    assert resolve_num_micro_batches(steps, micro) == max(steps, micro)


def test_two_ways_of_accumulating_are_refused_with_what_both_would_do() -> None:
    with pytest.raises(ConfigurationError, match="num_micro_batches=8 does what both"):
        resolve_num_micro_batches(4, 2)
