"""A model's shape for tests of the configuration's rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate_megatron.models.registry import family_of
from accelerate_megatron.models.shape import ModelShape
from tests.helpers.tiny_models import TinyModel


def shape(**changes: Any) -> ModelShape:
    """Return a Llama of 4 layers, hidden 64, 4 heads; `changes` are fields of the shape."""
    config = TinyModel("llama", changes={"num_key_value_heads": 4}).config()
    return replace(family_of(config).shape(config), **changes)
