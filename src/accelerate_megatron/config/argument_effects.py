"""What `other_megatron_args` changes about shape, layout and run. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accelerate_megatron.config.arguments import MegatronArguments
from accelerate_megatron.config.run import EngineSettings, RunConfig
from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.shape import ModelShape


def with_arguments(run: RunConfig, arguments: MegatronArguments) -> RunConfig:
    """Return `run` with what the arguments say beside shape, layout and schedule."""
    recompute = run.recompute
    if recompute is not None:
        recompute = replace(recompute, **arguments.of("recompute"))
    return replace(
        run,
        recompute=recompute,
        experts=replace(run.experts, **arguments.of("experts")),
        loss_scaling=replace(run.loss_scaling, **arguments.of("scaling")),
        engine=EngineSettings(
            transformer=arguments.of("transformer"),
            optimizer=arguments.of("optimizer"),
            ddp=arguments.of("ddp"),
        ),
        **arguments.of("run"),
    )


def with_zeros_counted(run: RunConfig) -> RunConfig:
    """Return `run` with the zeros among the gradients counted in each update."""
    counted = {**run.engine.optimizer, "log_num_zeros_in_grad": True}
    return replace(run, engine=replace(run.engine, optimizer=counted))


def rotary_asked(arguments: MegatronArguments) -> bool | None:
    """Return whether `position_embedding_type` asks for rotary positions; None: nothing.

    Raises:
        UnsupportedError: It asks for ALiBi.
    """
    kind = arguments.of("shape").get("position_embedding")
    if kind == "alibi":
        raise UnsupportedError(
            "other_megatron_args has position_embedding_type='alibi'; the positions here are "
            "learned_absolute and rope. Leave it out."
        )
    return None if kind is None else kind in ("rope", "rotary")


def changed_shape(shape: ModelShape, arguments: MegatronArguments) -> ModelShape:
    """Return `shape` with what the arguments say instead of the model's config.

    Positions are left to `resolve_shape`.

    Raises:
        ConfigurationError: An argument contradicts the weights.
    """
    given = dict(arguments.of("shape"))
    given.pop("position_embedding", None)
    changes: dict[str, Any] = {
        name: given.pop(name)
        for name in ("norm_epsilon", "initializer_range", "softmax_scale")
        if name in given
    }
    if given.pop("gelu_tanh", False):
        changes["activation"] = "gelu_tanh"
    theta, percent = given.pop("rope_theta", None), given.pop("rotary_percent", None)
    if theta is not None:
        changes["rope_parameters"] = {**shape.rope_parameters, "rope_theta": theta}
    if percent is not None:
        channels = int(shape.kv_channels * percent)
        changes["rotary_channels"] = None if channels == shape.kv_channels else channels
    heads = given.pop("attention_head_type", None)
    if heads is not None and (heads == "multiquery") != (shape.num_query_groups == 1):
        raise ConfigurationError(
            f"other_megatron_args has attention_head_type={heads!r}, but the model given to "
            f"prepare has {shape.num_query_groups} key/value heads, and its weights with them. "
            "Make the model with the number you want."
        )
    if given and shape.experts is not None:
        changes["experts"] = replace(shape.experts, **given)
    return replace(shape, **changes)


def contradictions(arguments: MegatronArguments, resolved: Mapping[str, Any]) -> list[str]:
    """Return which arguments differ from what the script's objects have decided.

    Args:
        arguments: The arguments.
        resolved: The run under Megatron's names.
    """
    problems = []
    for name, value in arguments.of("fixed").items():
        decided = resolved[name]
        if value == decided or not (value or decided):  # no experts are None, 0 and False
            continue
        if decided is None and name in _KNOWN_LATER:
            continue
        problems.append(
            f"other_megatron_args has {name}={value!r}, but the run has {name}={decided!r}, "
            "which follows from the model, the DataLoader, the plugin and the number of ranks. "
            "Change it there, or leave it out."
        )
    return problems


_KNOWN_LATER = ("micro_batch_size", "global_batch_size")
"""Without a DataLoader the first batch decides them."""
