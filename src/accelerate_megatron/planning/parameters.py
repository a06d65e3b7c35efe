"""How many parameters a rank holds, from the shape of the model and the layout. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accelerate_megatron.config.encoder_decoder_rules import stages_of_stacks
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.megatron_shapes import is_in_layer, megatron_shape, num_layers_of
from accelerate_megatron.models.shape import ModelShape

_SPLIT_OVER_TP = (
    "word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q.weight",
    "linear_kv.weight",
    "relative_attention_bias.weight",
    "linear_q_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "linear_proj.weight",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "linear_fc2.weight",
)
"""Ends of the names of parameters that tensor parallelism cuts; the rest is on every rank."""
_EXPERT = ".mlp.experts."
_FIRST_STAGE = "embedding."
"""Also on the first stage of a decoder beside an encoder."""
_WORDS = "embedding.word_embeddings.weight"
_ON_EVERY_STAGE = "_relative_pos_emb."
"""Of the positions of a stack: on each of its stages."""
_LAYER = ("decoder.layers.{layer}", "encoder.layers.{layer}")


@dataclass(frozen=True)
class RankParameters:
    """Parameters that one rank holds.

    Attributes:
        dense: Those that all data-parallel ranks hold alike.
        experts: Those of routed experts, which have data-parallel ranks of their own.
    """

    dense: int
    experts: int = 0

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.experts


def total_parameters(family: Family, shape: ModelShape) -> int:
    """Return the parameters of the whole model, as Hugging Face counts them."""
    return sum(
        math.prod(megatron_shape(name, shape))
        * _occurrences(name, shape, range(num_layers_of(name, shape)))
        for name in family.parameters(shape)
    )


def stage_parameters(
    family: Family, shape: ModelShape, layout: Layout, stage: int
) -> RankParameters:
    """Return the parameters of a rank on pipeline stage `stage`, counted from 0.

    What several stages hold, such as a tied output layer on another stage than the embedding, is
    counted on each.
    """
    dense = experts = 0
    for name in family.parameters(shape):
        size = math.prod(_padded(name, shape, layout))
        count = size * _on_stage(name, shape, layout, stage)
        if _EXPERT in name:
            experts += count // (layout.ep_size * layout.etp_size)
        else:
            dense += count // (layout.tp_size if name.endswith(_SPLIT_OVER_TP) else 1)
    is_last = stage == layout.pp_size - 1
    if shape.tied_embeddings and is_last and not _on_stage(_WORDS, shape, layout, stage):
        dense += math.prod(_padded("output_layer.weight", shape, layout)) // layout.tp_size
    return RankParameters(dense, experts)


def _padded(name: str, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    rows, *rest = megatron_shape(name, shape)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
        rows = layout.padded_vocab_size(shape.vocab_size)
    return (rows, *rest)


def _on_stage(name: str, shape: ModelShape, layout: Layout, stage: int) -> int:
    """Return how often a stage has the parameter `name`, which may hold `{layer}`."""
    of_encoder, of_decoder = stages_of_blocks(shape, layout)
    stages = of_encoder if name.startswith("encoder") else of_decoder
    if name.startswith(_LAYER):
        if stage not in stages:
            return 0
        per_stage = num_layers_of(name, shape) // len(stages)
        first = stages.index(stage) * per_stage
        return _occurrences(name, shape, range(first, first + per_stage))
    if name.startswith(_FIRST_STAGE):
        return int(stage in (0, of_decoder[0]))
    if _ON_EVERY_STAGE in name:
        return int(stage in stages)
    return int(stage == stages[-1])


def stages_of_blocks(shape: ModelShape, layout: Layout) -> tuple[range, range]:
    """Return the stages with layers of an encoder beside a decoder, and those with the others."""
    every = range(layout.pp_size)
    if shape.encoder_decoder is None or layout.pp_size == 1:
        return every, every
    num_encoder_stages, _ = stages_of_stacks(layout.pp_size, layout.split_rank)
    return every[:num_encoder_stages], every[num_encoder_stages:]


def _occurrences(name: str, shape: ModelShape, layers: range) -> int:
    if not name.startswith(_LAYER):
        return 1
    return sum(is_in_layer(name, layer, shape) for layer in layers)
