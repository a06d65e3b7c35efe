"""Fewer key/value heads than tensor-parallel ranks: which degrees work."""

from __future__ import annotations

import pytest

from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.models.shape import ModelShape
from tests.helpers.tiny_models import TinyModel


def shape_with(num_heads: int, num_groups: int) -> ModelShape:
    changes = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_groups,
        "hidden_size": 96,
        "intermediate_size": 96,
        "head_dim": 16,
    }
    config = TinyModel("llama", changes=changes).config()
    return family_of(config).shape(config)


@pytest.mark.parametrize(
    ("num_heads", "num_groups", "tp_size"),
    [(8, 2, 4), (8, 1, 8), (8, 8, 8), (12, 6, 3), (12, 3, 6)],
)
def test_ranks_may_share_a_key_value_head(num_heads: int, num_groups: int, tp_size: int) -> None:
    layout = Layout(world_size=tp_size, tp_size=tp_size)

    assert layout.model_problems(shape_with(num_heads, num_groups), 1) == []


@pytest.mark.parametrize(("num_heads", "num_groups", "tp_size"), [(12, 3, 4), (12, 3, 2)])
def test_heads_that_fall_unevenly_are_refused_with_the_degrees_that_work(
    num_heads: int, num_groups: int, tp_size: int
) -> None:
    layout = Layout(world_size=12, tp_size=tp_size)

    (problem,) = layout.model_problems(shape_with(num_heads, num_groups), 1)

    assert f"it does not divide {num_groups} key/value heads" in problem
    assert "tp_degree can be 1 or 3 or 6 or 12" in problem
