"""From the plugin and the model's shape to the layout and the shape that will run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from accelerate_megatron.config.argument_effects import changed_shape, rotary_asked
from accelerate_megatron.config.context_rules import sequence_length_problem
from accelerate_megatron.config.encoder_decoder_rules import encoder_decoder_length_problems
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.memory_savers import (
    fsdp_problems,
    recompute_layer_problems,
    recompute_module_problems,
)
from accelerate_megatron.config.nearest import nearest_layouts
from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.forced_rotary import forcing_problem, with_rotary_positions
from accelerate_megatron.models.shape import ModelShape

PRECISIONS = ("no", "bf16", "fp16")


def resolve_layout(plugin: Any, world_size: int) -> Layout:
    """Return the layout that the plugin asks for on `world_size` ranks.

    Raises:
        ConfigurationError: The sizes do not fit the world or each other.
    """
    layout = Layout(
        world_size=world_size,
        tp_size=plugin.tp_degree,
        pp_size=plugin.pp_degree,
        layers_per_virtual_stage=plugin.num_layers_per_virtual_pipeline_stage,
        split_rank=plugin.pipeline_model_parallel_split_rank,
        last_stage_layers=plugin.decoder_last_pipeline_num_layers,
        sequence_parallel=plugin.sequence_parallelism,
        cp_size=plugin.context_parallel_size,
        ep_size=plugin.expert_model_parallel_size,
        etp_size=plugin.expert_tensor_parallel_size,
        **plugin.routed_arguments.of("layout"),
    )
    layout.check()
    return layout


def check_precision(mixed_precision: str) -> None:
    """Refuse a `mixed_precision` that the engine does not run.

    Raises:
        UnsupportedError: It is not in `PRECISIONS`.
    """
    if mixed_precision not in PRECISIONS:
        raise UnsupportedError(
            f"mixed_precision is {mixed_precision!r}; this version runs "
            f"{' or '.join(repr(precision) for precision in PRECISIONS)}."
        )


def resolve_shape(shape: ModelShape, plugin: Any) -> ModelShape:
    """Return `shape` with what the plugin changes about the model.

    Raises:
        UnsupportedError: The plugin asks for positions that the model cannot have.
    """
    shape = _with_positions(changed_shape(shape, plugin.routed_arguments), plugin)
    changes: dict[str, float] = {}
    if plugin.hidden_dropout is not None:
        changes.update(
            hidden_dropout=plugin.hidden_dropout, embedding_dropout=plugin.hidden_dropout
        )
        if shape.encoder_decoder is not None:  # whose config has one dropout for all places
            changes.update(mlp_dropout=plugin.hidden_dropout)
    if plugin.attention_dropout is not None:
        changes.update(attention_dropout=plugin.attention_dropout)
    return replace(shape, **changes)  # type: ignore[arg-type]  # all are float fields


def _with_positions(shape: ModelShape, plugin: Any) -> ModelShape:
    """Return `shape` with the positions that the plugin asks for; rotary ones can be forced."""
    rotary = plugin.use_rotary_position_embeddings
    if rotary is None:
        rotary = rotary_asked(plugin.routed_arguments)
    if rotary is None or rotary == (shape.position_embedding == "rope"):
        return shape
    why = forcing_problem(shape) if rotary else "its weights hold no others"
    if why is not None:
        raise UnsupportedError(
            f"use_rotary_position_embeddings is {rotary}, but a {shape.model_type} model has "
            f"{shape.position_embedding} positions, and {why}; leave "
            "use_rotary_position_embeddings out."
        )
    return with_rotary_positions(shape)


def model_problems(
    layout: Layout, shape: ModelShape, plugin: Any, num_micro_batches: int
) -> list[str]:
    """Return why the model does not fit the layout or the plugin; empty when it does."""
    problems = layout.model_problems(shape, num_micro_batches)
    if not problems:  # how many layers a stage has is known only then
        problems = recompute_layer_problems(plugin, layout, shape)
    problems += recompute_module_problems(plugin, shape)
    problems += fsdp_problems(plugin, layout, shape)
    problems += encoder_decoder_length_problems(plugin, layout, shape)
    if plugin.custom_model_provider_function and shape.encoder_decoder and layout.pp_size > 1:
        problems.append(
            f"custom_model_provider_function is set, the model is a {shape.model_type}, and "
            f"pp_degree is {layout.pp_size}: between stages the encoder's output travels with the "
            "decoder's, in a form that a stage of your own cannot know. Leave the function out, or "
            "set pp_degree to 1."
        )
    if plugin.return_logits and shape.encoder is not None and shape.encoder.head == "none":
        problems.append(
            f"return_logits is True, but this {shape.model_type} model has no head that computes "
            "logits. Leave it out, or prepare a model with a head, such as a ...ForMaskedLM."
        )
    if plugin.seq_length is not None:
        if shape.max_positions is not None and plugin.seq_length > shape.max_positions:
            problems.append(
                f"seq_length={plugin.seq_length} is longer than the model's {shape.max_positions} "
                f"positions; set seq_length to {shape.max_positions} or less."
            )
        uneven = sequence_length_problem(
            plugin.seq_length, cp_size=layout.cp_size, split_over=layout.sequence_split_over
        )
        problems += [uneven] if uneven else []
    return problems


def nearest_choices(
    layout: Layout,
    shape: ModelShape,
    plugin: Any,
    num_micro_batches: int,
    *,
    also: Callable[[Layout], bool] = lambda _: True,
) -> str | None:
    """Name the layouts nearest to `layout` that `model_problems` has nothing against.

    None: there is no such layout, so what is wrong is not the layout.

    Args:
        layout: The one that was refused.
        shape: The model.
        plugin: The plugin.
        num_micro_batches: Micro-batches of one update.
        also: What else a layout has to fulfil: the rule by which this one was refused.
    """
    return nearest_layouts(
        layout,
        lambda other: (
            not other.world_problems()
            and not model_problems(other, shape, plugin, num_micro_batches)
            and also(other)
        ),
        shape,
    )


def resolve_micro_batch_size(batch_sizes: Iterable[int], *, smallest: bool) -> int | None:
    """Return the micro-batch size that the prepared DataLoaders ask for; None without any."""
    sizes = list(batch_sizes)
    if not sizes:
        return None
    return min(sizes) if smallest else max(sizes)


def resolve_num_micro_batches(gradient_accumulation_steps: int, num_micro_batches: int) -> int:
    """Return the micro-batches of one update: those of the plugin, or the accumulated batches.

    The plugin stays as the script made it: another `Accelerator` may get it too.

    Raises:
        ConfigurationError: Both are more than 1.
    """
    if gradient_accumulation_steps > 1 and num_micro_batches > 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} and "
            f"num_micro_batches={num_micro_batches} both accumulate gradients. Give one of them: "
            f"num_micro_batches={gradient_accumulation_steps * num_micro_batches} does what both "
            "would together."
        )
    return max(gradient_accumulation_steps, num_micro_batches)
