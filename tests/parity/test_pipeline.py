"""Pipelines of uneven stages and of any number of micro-batches; what stays bitwise equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, ragged_samples
from tests.parity.test_parity import (
    ADAMW,
    SAMPLES,
    SCHEDULE,
    SGD,
    check_losses_and_norms,
    check_weights,
    expected,
)
from tests.parity.training import LayoutCase, RankResult, train

GPT2 = TinyModel("gpt2")  # tied over the stages
SIX_LAYERS = TinyModel("llama", tied=False, changes={"num_hidden_layers": 6})


def uneven(pp: int, last: int, micro_batches: int = 4, **plugin: Any) -> LayoutCase:
    settings = {"pp_degree": pp, "decoder_last_pipeline_num_layers": last, **plugin}
    return LayoutCase(pp, settings, micro_batches)


def even(pp: int, micro_batches: int) -> LayoutCase:
    return LayoutCase(pp, {"pp_degree": pp}, micro_batches)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(uneven(2, 1), GPT2, id="pp2-3+1"),
        pytest.param(uneven(2, 3), GPT2, id="pp2-1+3"),
        pytest.param(uneven(3, 2), GPT2, id="pp3-1+1+2"),
        pytest.param(
            uneven(2, 2, num_layers_per_virtual_pipeline_stage=2), SIX_LAYERS, id="pp2-4+2-vp2"
        ),
        pytest.param(even(2, 1), GPT2, id="pp2-one-micro-batch"),
        pytest.param(even(4, 2), GPT2, id="pp4-fewer-micro-batches-than-stages"),
        pytest.param(even(2, 8), GPT2, id="pp2-eight-micro-batches"),
    ],
)
def test_training_equals_plain_pytorch(layout: LayoutCase, model: TinyModel) -> None:
    ranks = run_ranks(train, layout, model, SGD, SAMPLES, SCHEDULE, num_ranks=layout.num_ranks)

    oracle = expected(model, SGD)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)


TWENTY_UPDATES = ragged_samples(20 * 8)


def after_twenty_updates(layout: LayoutCase) -> list[RankResult]:
    return run_ranks(train, layout, GPT2, ADAMW, TWENTY_UPDATES, num_ranks=layout.num_ranks)


@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_layers_per_virtual_pipeline_stage": 1}, id="vp2"),
        pytest.param({"decoder_last_pipeline_num_layers": 1}, id="uneven"),
        pytest.param({"use_distributed_optimizer": True}, id="dist-opt"),
    ],
)
def test_tied_embeddings_stay_bitwise_tied_over_the_stages(plugin: dict[str, Any]) -> None:
    first, last = after_twenty_updates(LayoutCase(2, {"pp_degree": 2, **plugin}, 2))

    embedding = only(first.shards, "word_embeddings.weight")
    assert torch.equal(embedding, only(last.shards, "output_layer.weight"))
    assert not torch.equal(embedding[:99], GPT2.build().transformer.wte.weight)


def only(shards: dict[str, torch.Tensor], end: str) -> torch.Tensor:
    (value,) = (value for name, value in shards.items() if name.endswith(end))
    return value


@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param({"tp_degree": 2, "sequence_parallelism": True}, id="tp2-sp"),
        pytest.param({"tp_degree": 2}, id="tp2"),
        pytest.param({"context_parallel_size": 2}, id="cp2"),
    ],
)
def test_replicated_parameters_stay_bitwise_equal(plugin: dict[str, Any]) -> None:
    one, other = after_twenty_updates(LayoutCase(2, plugin))

    split_over_tp = "tp_degree" in plugin
    replicated = [
        name
        for name in one.shards
        if not split_over_tp
        or "layernorm" in name
        or "position" in name
        or name.endswith(("linear_proj.bias", "linear_fc2.bias"))
    ]
    assert len(replicated) >= 2 + 4 * 6
    for name in replicated:
        assert torch.equal(one.shards[name], other.shards[name]), name


def prepare_error(plugin: dict[str, Any]) -> str:
    try:
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
        hf_model = GPT2.build()
        accelerator.prepare(hf_model, TinyOptimizer().build(hf_model))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("num_ranks", "plugin", "part"),
    [
        (
            3,
            {"pp_degree": 3, "num_micro_batches": 3},
            "pp_degree can be 1, or set decoder_last_pipeline_num_layers to 2.",
        ),
        (
            3,
            {"pp_degree": 3, "decoder_last_pipeline_num_layers": 1},
            "leaves 3 of the model's 4 layers for 2 other stages, which must get equal numbers "
            "and at least one each. It can be 2 (stages of 1+1+2).",
        ),
        (2, {"pp_degree": 2, "decoder_last_pipeline_num_layers": 4}, "1 (stages of 3+1); 2"),
        (1, {"decoder_last_pipeline_num_layers": 2}, "pp_degree is 1"),
        (
            2,
            {
                "pp_degree": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
                "num_micro_batches": 3,
            },
            "num_micro_batches=3 must be a multiple of pp_degree=2",
        ),
        (
            2,
            {
                "pp_degree": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
                "decoder_last_pipeline_num_layers": 1,
                "num_micro_batches": 2,
            },
            "3 must divide the last stage's decoder_last_pipeline_num_layers=1 too",
        ),
        (
            2,
            {
                "pp_degree": 2,
                "num_layers_per_virtual_pipeline_stage": 2,
                "num_micro_batches": 2,
            },
            "into two chunks or more; it can be 1.",
        ),
    ],
    ids=["uneven", "no-split", "last-takes-all", "one-stage", "rounds", "vp-last", "vp-few"],
)
def test_what_cannot_be_split_is_refused(num_ranks: int, plugin: dict[str, Any], part: str) -> None:
    for error in run_ranks(prepare_error, plugin, num_ranks=num_ranks):
        assert part in error
