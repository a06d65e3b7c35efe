"""What a refused layout names instead: the nearest ones that `plan` would find too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accelerate_megatron import MegatronLMPlugin
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.nearest import degrees, nearest_layouts, nearest_multiples
from accelerate_megatron.config.resolve import model_problems, nearest_choices, resolve_layout
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.models.registry import FAMILIES, family_of
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.planning.search import PlanRequest, find_plans
from tests.config.shapes import shape
from tests.helpers.tiny_models import TinyModel


def shape_of(family: str, **changes: Any) -> ModelShape:
    config = TinyModel(family, tied=False, changes=changes).config()
    return family_of(config).shape(config)


def choices_of(
    model: ModelShape, world_size: int, num_micro_batches: int = 8, **plugin: Any
) -> str:
    settings = MegatronLMPlugin(**plugin)
    layout = resolve_layout(settings, world_size)
    assert model_problems(layout, model, settings, num_micro_batches)
    return nearest_choices(layout, model, settings, num_micro_batches) or ""


@pytest.mark.parametrize(
    ("number", "size", "nearest"), [(6, 4, "4 or 8"), (3, 4, "4"), (100, 8, "96 or 104")]
)
def test_numbers_of_ranks_around_one_that_does_not_divide(
    number: int, size: int, nearest: str
) -> None:
    assert nearest_multiples(number, size) == nearest


def test_sizes_that_the_model_does_not_have_are_not_named() -> None:
    assert choices_of(shape(), 6, tp_degree=3) == (
        "Nearest that works on 6 ranks: tp_degree=2, pp_degree=1; or tp_degree=1, pp_degree=1; "
        "or tp_degree=2, pp_degree=1, context_parallel_size=3."
    )


def test_everything_else_that_was_asked_for_stays_where_it_can() -> None:
    told = choices_of(shape(), 8, pp_degree=8, tp_degree=1, num_layers_per_virtual_pipeline_stage=1)

    # Four stages of the four layers have no chunks; two have two each.
    assert told.startswith(
        "Nearest that works on 8 ranks: tp_degree=1, pp_degree=4, "
        "num_layers_per_virtual_pipeline_stage=None; or tp_degree=1, pp_degree=2, "
        "num_layers_per_virtual_pipeline_stage=1; or "
    )


def test_experts_need_sequence_parallelism_and_divide() -> None:
    told = choices_of(shape_of("mixtral"), 8, tp_degree=2, expert_model_parallel_size=8)

    first = told.split("; or ")[0]
    assert first == (
        "Nearest that works on 8 ranks: tp_degree=2, pp_degree=1, expert_model_parallel_size=4, "
        "sequence_parallelism=True"
    )


def test_an_encoder_and_a_decoder_get_a_stage_each() -> None:
    told = choices_of(shape_of("t5"), 4, pp_degree=2)

    assert told.startswith(
        "Nearest that works on 4 ranks: tp_degree=1, pp_degree=2, "
        "pipeline_model_parallel_split_rank=1; or "
    )


def test_a_size_inside_experts_that_divides_is_named_before_none() -> None:
    told = choices_of(shape_of("mixtral"), 6, expert_tensor_parallel_size=3)

    assert told.startswith(
        "Nearest that works on 6 ranks: tp_degree=1, pp_degree=1, expert_tensor_parallel_size=2; or"
    )


def test_what_the_plugin_excludes_is_not_named() -> None:
    told = choices_of(shape_of("llama"), 4, pp_degree=2, use_custom_fsdp=True)

    assert "pp_degree=1" in told
    assert "pp_degree=2" not in told


def test_where_no_layout_helps_none_is_named() -> None:
    assert choices_of(shape(), 4, seq_length=65) == ""


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_first_that_is_named_is_among_the_plans(family: str) -> None:
    model = shape_of(family)
    request = PlanRequest(
        num_devices=8,
        memory_bytes=None,
        global_batch_size=64,
        micro_batch_size=1,
        seq_length=64,
        precision="bf16",
    )
    plans = [plan.layout for plan in find_plans(FAMILIES[family], model, request)]
    asked = Layout(world_size=8, tp_size=8, sequence_parallel=True)
    assert asked not in plans

    found: list[Layout] = []

    def fits(other: Layout) -> bool:
        found.append(other)
        return not other.world_problems() and not other.model_problems(model, 8)

    told = nearest_layouts(asked, fits, model)

    assert told is not None
    assert told.count("tp_degree") == 3
    working = [layout for layout in found if layout in plans]
    assert working
    assert f"tp_degree={working[0].tp_size}, pp_degree={working[0].pp_size}" in told


def test_every_cut_of_a_world_is_found_once() -> None:
    cuts = [tuple(sizes.values()) for sizes in degrees(12, 4)]

    assert len(cuts) == len(set(cuts))
    assert all(12 % (tp * pp * cp) == 0 and 12 // pp % ep == 0 for tp, pp, cp, ep in cuts)
    assert {(2, 3, 2, 4), (1, 1, 1, 4), (12, 1, 1, 1)} <= set(cuts)


def test_expert_groups_that_the_world_cannot_hold_are_answered_with_some_that_it_can() -> None:
    layout = Layout(world_size=6, ep_size=4)

    with pytest.raises(ConfigurationError, match=r"expert_model_parallel_size=3; or"):
        layout.check()
    assert not replace(layout, ep_size=3).world_problems()
    with pytest.raises(ConfigurationError, match=r"works on 6 ranks: .*rt_tensor_parallel_size=3;"):
        Layout(world_size=6, etp_size=4).check()
