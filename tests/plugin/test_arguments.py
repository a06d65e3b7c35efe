"""`other_megatron_args`: names, kinds, refusals, and where each one goes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from transformers import LlamaConfig

from accelerate_megatron import MegatronLMPlugin, engine
from accelerate_megatron.config.argument_effects import contradictions
from accelerate_megatron.config.argument_refusals import REFUSED
from accelerate_megatron.config.argument_table import ARGUMENTS, PLUGIN_FIELDS
from accelerate_megatron.config.arguments import (
    NEEDS,
    Context,
    MegatronArguments,
    known_names,
    route_arguments,
    unmet_needs,
)
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.logging import resolve_logging
from accelerate_megatron.config.resolve import resolve_layout
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.config.view import megatron_view
from accelerate_megatron.errors import ConfigurationError, UnknownFieldError, UnsupportedError
from accelerate_megatron.models.llama import llama_shape


def test_nothing_given_changes_nothing() -> None:
    assert route_arguments(None).given == {}
    assert route_arguments({}).of("run") == {}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("make_vocab_size_divisable_by", "make_vocab_size_divisible_by"),
        ("--layernorm-epsilon-", "layernorm_epsilon"),
        ("sead", "seed"),
        ("tensor_model_paralel_size", "tensor_model_parallel_size"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_ones(name: str, nearest: str) -> None:
    with pytest.raises(UnknownFieldError, match=f"no argument of Megatron's.*{nearest}"):
        MegatronLMPlugin(other_megatron_args={name: 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 1e-3}, "lr=0.001.*torch optimizer given to prepare says it"),
        ({"fp8": "hybrid"}, "Transformer Engine's layers"),
        ({"data_path": "x"}, "MegatronLMDummyDataLoader"),
        ({"mtp_num_layers": 1}, "no model family with it is supported"),
        ({"bias_gelu_fusion": True}, "fused kernel"),
    ],
)
def test_a_known_name_without_a_place_is_refused_with_the_reason(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        MegatronLMPlugin(other_megatron_args=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": "many"}, "other_megatron_args: seed is 'many'; it must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"make_vocab_size_divisible_by": 0}, "is 0; it must be a whole number, 1 or more"),
        ({"log_interval": 0}, "log_interval is 0; it must be a whole number, 1 or more"),
        ({"recompute_modules": ["mlp", "attn"]}, "is 'attn'; it must be one of core_attn, layer"),
        ({"recompute_modules": 3}, "recompute_modules is '3'; it must be one of core_attn"),
        ({"seed": float("inf")}, "seed is inf; it must be a whole number"),
        ({"rotary_base": "inf"}, "rotary_base is 'inf'; it must be a number"),
        ({"rotary_base": True}, "rotary_base is True; it must be a number"),
        ({"overlap_grad_reduce": "perhaps"}, "must be one of true"),
        ({"exp_avg_dtype": "fp7"}, "must be one of fp32, bf16, fp16, fp8"),
        ({"moe_token_drop_policy": "none"}, "must be one of probs, position"),
        ({"layernorm_epsilon": 1e-5, "norm_epsilon": 1e-6}, "mean one thing"),
        ("seed", "it must be a dictionary"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin(other_megatron_args=given)


def test_values_are_read_by_kind() -> None:
    routed = route_arguments(
        {
            "overlap_grad_reduce": "yes",
            "seed": "7",
            "exp_avg_dtype": "torch.bfloat16",
            "recompute_modules": "core_attn,mlp",
        }
    )

    assert routed.of("run") == {"overlap_grad_reduce": True, "seed": 7}
    assert routed.of("optimizer") == {"exp_avg_dtype": "bf16"}
    assert routed.of("recompute") == {"modules": ("core_attn", "mlp")}
    long = 2**62 + 1  # which no float is
    assert route_arguments({"seed": long}).of("run") == {"seed": long}


def test_megatrons_names_set_the_plugins_fields() -> None:
    plugin = MegatronLMPlugin(
        other_megatron_args={"tensor_model_parallel_size": 2, "clip_grad": 0.5, "train_iters": 7}
    )

    assert (plugin.tp_degree, plugin.gradient_clipping, plugin.train_iters) == (2, 0.5, 7)


def test_a_field_and_an_argument_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="tp_degree is 4, and other_megatron_args says 2"):
        MegatronLMPlugin(tp_degree=4, other_megatron_args={"tensor_model_parallel_size": 2})


def test_no_name_is_both_accepted_and_refused() -> None:
    assert not set(REFUSED) & (set(ARGUMENTS) | set(PLUGIN_FIELDS))
    assert {argument.needs for argument in ARGUMENTS.values() if argument.needs} <= set(NEEDS)


def test_every_field_of_megatrons_configuration_has_an_answer() -> None:
    engine.activate("cpu")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    fields = {
        field.name
        for config in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(config)
    }

    assert fields <= set(known_names())


def test_arguments_for_megatrons_configuration_name_fields_of_it() -> None:
    engine.activate("cpu")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    homes = {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }
    for name, argument in ARGUMENTS.items():
        if argument.home in homes:
            fields = {field.name for field in dataclasses.fields(homes[argument.home])}
            assert argument.field in fields, name


NOT_IN_EFFECT = {
    "distribute_saved_activations": True,
    "overlap_p2p_comm_warmup_flush": True,
    "exp_avg_dtype": "bf16",
    "optimizer_offload_fraction": 0.5,
    "hysteresis": 3,
    "overlap_param_gather": True,
    "bucket_size": 1000,
    "average_in_collective": True,
    "moe_grouped_gemm": True,
    "cp_comm_type": "a2a",
    "recompute_modules": ["mlp"],
    "lr_wsd_decay_iters": 3,
}


@pytest.mark.parametrize("name", NOT_IN_EFFECT)
def test_an_argument_that_would_have_no_effect_is_refused(name: str) -> None:
    plugin = MegatronLMPlugin(other_megatron_args={name: NOT_IN_EFFECT[name]})

    problems = unmet_needs(Context(plugin, llama_shape(LlamaConfig()), "no"))

    assert len(problems) == 1
    assert f"{name}=" in problems[0]
    assert "has an effect only with" in problems[0]


def test_arguments_are_routed_once_by_the_plugin_however_often_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counting(given: Any) -> MegatronArguments:
        calls.append(given)
        return route_arguments(given)

    monkeypatch.setattr("accelerate_megatron.plugin.route_arguments", counting)
    plugin = MegatronLMPlugin(other_megatron_args={"seed": 3, "cp_comm_type": "a2a"})
    layout = resolve_layout(plugin, 1)

    assert layout.cp_comm_type == "a2a"
    assert plugin.routed_arguments.of("run") == {"seed": 3}
    assert calls == [{"seed": 3, "cp_comm_type": "a2a"}]
    assert copy.deepcopy(plugin).routed_arguments == plugin.routed_arguments


def test_two_intervals_of_one_log_are_refused_unless_they_are_equal() -> None:
    with pytest.raises(ConfigurationError, match="which mean one thing"):
        route_arguments({"log_interval": 2, "tensorboard_log_interval": 3})

    equal = route_arguments({"log_interval": 2, "tensorboard_log_interval": 2})
    assert equal.of("logging") == {"interval": 2}


def test_every_argument_that_the_scripts_objects_decide_can_be_compared() -> None:
    run = RunConfig(
        layout=Layout(world_size=1),
        shape=llama_shape(LlamaConfig()),
        precision="no",
        num_micro_batches=1,
        micro_batch_size=None,
        gradient_clipping=1.0,
        use_distributed_optimizer=False,
        per_token_loss=True,
        optimizer=None,
        schedule=None,
        seed=0,
    )
    view = megatron_view(run, MegatronLMPlugin(), LlamaConfig())

    fixed = {name for name, argument in ARGUMENTS.items() if argument.home == "fixed"}
    assert fixed - view.keys() == set()
    assert contradictions(route_arguments({"vocab_size": 7, "num_experts": 0}), view) == [
        "other_megatron_args has vocab_size=7, but the run has vocab_size=32000, which follows "
        "from the model, the DataLoader, the plugin and the number of ranks. Change it there, or "
        "leave it out."
    ]


@pytest.mark.parametrize(
    "name", [name for name, argument in ARGUMENTS.items() if argument.home == "logging"]
)
def test_every_argument_about_the_log_sets_a_field_of_its_settings(name: str) -> None:
    value = 3 if ARGUMENTS[name].kind == "int" else True
    plugin = MegatronLMPlugin(tensorboard_dir="/tmp/x", other_megatron_args={name: value})

    assert getattr(resolve_logging(plugin), ARGUMENTS[name].field) == value


def test_an_argument_that_is_not_taken_from_there_says_what_is() -> None:
    for name, reason in REFUSED.items():
        with pytest.raises(UnsupportedError) as told:
            MegatronLMPlugin(other_megatron_args={name: 1})

        text = str(told.value)
        assert f"other_megatron_args has {name}=1, which is not taken from there: {reason}" in text
