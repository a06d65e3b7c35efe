"""Rotary positions in the place of learned ones, for a plugin that forces them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accelerate_megatron.models.family import Family
from accelerate_megatron.models.parameters import Direct, Parameter
from accelerate_megatron.models.shape import ModelShape

LEARNED_POSITIONS = "embedding.position_embeddings.weight"
ROTARY_BASE = 10000.0
"""Megatron's own default of `rotary_base`."""


def forcing_problem(shape: ModelShape) -> str | None:
    """Return why `shape` cannot get rotary positions in the place of its own; None when it can."""
    channels = shape.rotary_channels or shape.kv_channels
    if shape.encoder_decoder is not None:
        return "this version forces rotary ones on models of one stack alone"
    if channels % 2:
        return f"rotary positions turn pairs of channels, of which each head has {channels}"
    return None


def with_rotary_positions(shape: ModelShape) -> ModelShape:
    """Return `shape` with rotary positions; a base that it has already stays.

    The longest sequence stays that of the learned positions: a batch beyond it is still refused.
    """
    rope = {"rope_type": "default", "rope_theta": ROTARY_BASE, **shape.rope_parameters}
    return replace(shape, position_embedding="rope", rope_parameters=rope)


def without_learned_positions(family: Family, own: ModelShape) -> Family:
    """Return `family` without the row of its learned positions, and with their name left out.

    Args:
        family: The family of a model with learned positions.
        own: The shape of the model as its config has it.
    """
    row = family.parameters(own)[LEARNED_POSITIONS]
    assert isinstance(row, Direct), "positions are one tensor in every family"

    def smaller(shape: ModelShape) -> Mapping[str, Parameter]:
        rows = family.parameters(shape)
        return {name: row for name, row in rows.items() if name != LEARNED_POSITIONS}

    return replace(family, parameters=smaller, left_out=(row.hf,))
