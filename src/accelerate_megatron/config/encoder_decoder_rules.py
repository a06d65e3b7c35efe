"""Models with an encoder and a decoder: which stages and which lengths they get. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate_megatron.config.context_rules import sequence_length_problem
from accelerate_megatron.config.nearest import either
from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.shape import ModelShape

if TYPE_CHECKING:
    from accelerate_megatron.config.layout import Layout

SPLIT = "pipeline_model_parallel_split_rank"


def stages_of_stacks(pp_size: int, split_rank: int | None) -> tuple[int, int]:
    """Return the stages of the encoder and of the decoder; one stage alone holds both."""
    if split_rank is None:
        return 1, 1
    return split_rank, pp_size - split_rank


def encoder_decoder_problems(
    num_encoder_layers: int,
    num_decoder_layers: int,
    *,
    pp_size: int,
    split_rank: int | None,
    last_stage_layers: int | None,
    layers_per_virtual_stage: int | None,
) -> list[str]:
    """Return why encoder and decoder cannot be put on the stages; empty when they can."""
    problems = [
        f"{name} is {value}, which is for models without an encoder; leave it out. {why}"
        for name, value, why in (
            (
                "decoder_last_pipeline_num_layers",
                last_stage_layers,
                f"{SPLIT} says how encoder and decoder share the stages.",
            ),
            (
                "num_layers_per_virtual_pipeline_stage",
                layers_per_virtual_stage,
                "The stages of an encoder-decoder model are not interleaved.",
            ),
        )
        if value is not None
    ]
    if pp_size == 1:
        if split_rank is not None:
            problems.append(
                f"{SPLIT} is {split_rank} but pp_degree is 1: one stage holds encoder and decoder. "
                f"Set pp_degree to 2 or more, or leave {SPLIT} out."
            )
        return problems
    working = [
        split
        for split in range(1, pp_size)
        if num_encoder_layers % split == 0 and num_decoder_layers % (pp_size - split) == 0
    ]
    choices = (
        f"With pp_degree={pp_size} it can be {either(working)}."
        if working
        else f"With pp_degree={pp_size} no number works: set pp_degree to 2 and {SPLIT} to 1."
    )
    if split_rank is None:
        problems.append(
            f"{SPLIT} is not set and pp_degree is {pp_size}: it is the first stage with decoder "
            f"layers, those before it have the encoder's. {choices}"
        )
    elif not 0 < split_rank < pp_size:
        problems.append(
            f"{SPLIT} is {split_rank}; it must be from 1 to {pp_size - 1}, so that encoder and "
            f"decoder have a stage each. {choices}"
        )
    else:
        problems += [
            f"{SPLIT}={split_rank} gives the {stack} {stages} stages, which must divide its "
            f"{layers} layers. {choices}"
            for stack, layers, stages in (
                ("encoder", num_encoder_layers, split_rank),
                ("decoder", num_decoder_layers, pp_size - split_rank),
            )
            if layers % stages
        ]
    return problems


def encoder_decoder_length_problems(plugin: Any, layout: Layout, shape: ModelShape) -> list[str]:
    """Return what is wrong with the lengths that the plugin sets for the two stacks."""
    given = {
        name: length
        for name in ("encoder_seq_length", "decoder_seq_length")
        if (length := getattr(plugin, name)) is not None
    }
    if shape.encoder_decoder is None:
        return [
            f"{name} is {length}, and a {shape.model_type} model is no encoder-decoder model: set "
            "seq_length instead."
            for name, length in given.items()
        ]
    problems = []
    if None not in (plugin.seq_length, plugin.encoder_seq_length) and (
        plugin.seq_length != plugin.encoder_seq_length
    ):
        problems.append(
            f"seq_length is {plugin.seq_length} and encoder_seq_length is "
            f"{plugin.encoder_seq_length}: both are the length of the encoder's input; give one."
        )
    for name, length in given.items():
        uneven = sequence_length_problem(
            length, cp_size=1, split_over=layout.sequence_split_over, name=name
        )
        problems += [uneven] if uneven else []
    return problems


def refuse_encoder_decoder(shape: ModelShape, what: str) -> None:
    """Refuse what is there for models of one stack only.

    Raises:
        UnsupportedError: The model has an encoder; names its type and `what`.
    """
    if shape.encoder_decoder is not None:
        raise UnsupportedError(
            f"A {shape.model_type} model has an encoder and a decoder, and {what} knows models of "
            "one stack of layers only; use it with one of those."
        )


def stack_lengths(plugin: Any) -> tuple[int | None, int | None]:
    """Return what batches are padded or cut to, encoder and decoder; None: their own longest."""
    return plugin.encoder_seq_length or plugin.seq_length, plugin.decoder_seq_length
