"""The user's torch optimizer, read into the engine's terms and run by Megatron."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.training.optimizer_settings import read_optimizer
from accelerate_megatron.weights.placements import placements
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches, ragged_samples
from tests.parity.test_parity import check_losses_and_norms, check_weights, without_key_biases
from tests.parity.training import LayoutCase, train

GPT2 = TinyModel("gpt2")
LLAMA = TinyModel("llama")
SAMPLES = ragged_samples(3 * 8)
GROUPS = (
    ("wte", {"lr": 2e-3, "weight_decay": 0.0}),
    ("bias", {"weight_decay": 0.0}),
    ("ln_", {"weight_decay": 0.0}),
)


def read(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
    family = family_of(model.config)
    shape = family.shape(model.config)
    sources = {
        name: dict.fromkeys(segment.hf for segment in placement.segments)
        for name, placement in placements(family.parameters(shape), shape).items()
    }
    return read_optimizer(optimizer, model, sources)


# --- equality with plain torch -------------------------------------------------------------

# An eps above the noise of fp32: with 1e-8, what is noise in a gradient makes steps of its own, by
# more than half of the weights' tolerance.
ADAM = {"lr": 1e-3, "eps": 1e-6}
OPTIMIZERS = [
    pytest.param(TinyOptimizer("adam", {**ADAM, "weight_decay": 0.1}), id="adam-l2"),
    pytest.param(
        TinyOptimizer("adamw", {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}), id="betas"
    ),
    pytest.param(TinyOptimizer("sgd", {"lr": 0.1, "weight_decay": 0.05}), id="sgd-plain"),
    pytest.param(
        TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
        id="sgd-nesterov",
    ),
    pytest.param(
        TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), id="sgd-dampening"
    ),
    pytest.param(TinyOptimizer("adamw", {**ADAM, "weight_decay": 0.1}, groups=GROUPS), id="groups"),
    pytest.param(
        TinyOptimizer(
            "adamw",
            ADAM,
            groups=(("ln_", {"betas": (0.5, 0.6)}), ("wpe", {"eps": 1e-3})),
        ),
        id="groups-betas",
    ),
    pytest.param(
        TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9}, frozen=("wte", "ln_")), id="frozen"
    ),
    pytest.param(
        TinyOptimizer("adamw", ADAM, frozen=("wte", "wpe", "h.0.", "h.1.")),
        id="frozen-lower-half",
    ),
    pytest.param(TinyOptimizer("adamw", ADAM, frozen=("wpe", "h.", "ln_f")), id="only-embeddings"),
]
LAYOUTS = [
    pytest.param(LayoutCase(2, {"tp_degree": 2}), id="tp2"),
    pytest.param(LayoutCase(2, {"use_distributed_optimizer": True}), id="dp2-dist-opt"),
    pytest.param(LayoutCase(2, {"pp_degree": 2}, 4), id="pp2"),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_optimizer_is_the_one_that_was_given(
    layout: LayoutCase, optimizer: TinyOptimizer
) -> None:
    ranks = run_ranks(train, layout, GPT2, optimizer, SAMPLES, num_ranks=layout.num_ranks)

    oracle = oracle_run(OracleCase(GPT2, optimizer, global_batches(SAMPLES, 8)))
    check_losses_and_norms(ranks, oracle)
    oracle = replace(oracle, weights=without_key_biases(oracle.weights))
    check_weights(without_key_biases(ranks[-1].weights), oracle)


def test_frozen_parameters_stay_as_they_were() -> None:
    frozen = TinyOptimizer("adamw", {"lr": 1e-2}, frozen=("wte", "attn"))

    ranks = run_ranks(train, LayoutCase(2, {"tp_degree": 2}), GPT2, frozen, SAMPLES, num_ranks=2)

    before, after = GPT2.build().state_dict(), ranks[-1].weights
    for name, value in after.items():
        is_frozen = "wte" in name or "attn" in name
        assert torch.equal(value, before[name]) == is_frozen, name


# --- what is read ------------------------------------------------------------------------


def test_groups_keep_their_rates_and_decays() -> None:
    model = GPT2.build()
    optimizer = TinyOptimizer("adamw", {"lr": 1e-3, "weight_decay": 0.1}, groups=GROUPS)

    settings = read(optimizer.build(model), model)

    wanted = [(2e-3, 0.0), (1e-3, 0.0), (1e-3, 0.0), (1e-3, 0.1)]
    assert [(group.lr, group.weight_decay) for group in settings.groups] == wanted
    assert settings.group_of["embedding.word_embeddings.weight"] == 0
    assert settings.group_of["decoder.layers.3.mlp.linear_fc2.bias"] == 1
    assert settings.group_of["decoder.layers.3.mlp.linear_fc2.weight"] == 3


@pytest.mark.parametrize(
    ("make", "kind", "is_decoupled"),
    [
        (torch.optim.AdamW, "adam", True),
        (torch.optim.Adam, "adam", False),
        (lambda p: torch.optim.SGD(p, lr=0.1), "sgd", False),
    ],
    ids=["AdamW", "Adam", "SGD"],
)
def test_the_class_decides_how_weights_decay(make: Any, kind: str, is_decoupled: bool) -> None:
    model = GPT2.build()

    settings = read(make(model.parameters()), model)

    assert (settings.kind, settings.decoupled_weight_decay) == (kind, is_decoupled)


class OwnAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "make", [torch.optim.Adamax, torch.optim.NAdam, torch.optim.Adagrad, OwnAdamW]
)
def test_another_class_is_refused_by_name(make: Any) -> None:
    model = GPT2.build()

    with pytest.raises(
        UnsupportedError, match=rf"{make.__name__}; Megatron runs torch.optim.AdamW"
    ):
        read(make(model.parameters()), model)


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_an_option_that_megatron_lacks_is_refused(option: str) -> None:
    model = GPT2.build()
    optimizer = torch.optim.AdamW(model.parameters(), **{option: True})

    with pytest.raises(UnsupportedError, match=f"has {option}=True.*set {option}=False"):
        read(optimizer, model)


def test_groups_that_cut_through_a_fused_parameter_are_refused_naming_both() -> None:
    model = LLAMA.build()
    groups = (("q_proj", {"weight_decay": 0.0}),)

    with pytest.raises(ConfigurationError) as caught:
        read(TinyOptimizer("adamw", groups=groups).build(model), model)

    message = str(caught.value)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in message
    assert "model.layers.0.self_attn.q_proj.weight (group 0)" in message
    assert "model.layers.0.self_attn.k_proj.weight (group 1)" in message


def test_freezing_a_part_of_a_fused_parameter_is_refused_naming_both() -> None:
    model = LLAMA.build()
    optimizer = TinyOptimizer("adamw", frozen=("up_proj",))

    with pytest.raises(
        ConfigurationError, match=r"gate_proj.weight \(group 0\), .*up_proj.* \(frozen\)"
    ):
        read(optimizer.build(model), model)


def test_a_trainable_parameter_in_no_group_is_named() -> None:
    model = GPT2.build()
    optimizer = torch.optim.AdamW(model.transformer.wte.parameters())

    with pytest.raises(ConfigurationError, match=r"51 trainable .* \(transformer.wpe.weight, "):
        read(optimizer, model)


def test_parameters_of_another_model_are_refused() -> None:
    model = GPT2.build()
    strangers = [*model.parameters(), torch.nn.Parameter(torch.zeros(2))]

    with pytest.raises(ConfigurationError, match="holds 1 parameters that are not the model's"):
        read(torch.optim.AdamW(strangers), model)


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = GPT2.build()
    optimizer = torch.optim.AdamW(model.parameters())
    model.requires_grad_(False)

    with pytest.raises(
        ConfigurationError, match=re.escape("No parameter of the model is trainable")
    ):
        read(optimizer, model)
