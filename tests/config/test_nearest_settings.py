"""What refused settings of memory and precision name instead."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_megatron import MegatronLMPlugin
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.nearest_settings import (
    Surroundings,
    nearest_settings,
    settings_problems,
)
from tests.config.shapes import shape

OFFLOAD, OVERLAP = "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"
PRECISION_AWARE = "use_precision_aware_optimizer"


def nearest(precision: str = "no", around: dict[str, Any] | None = None, **plugin: Any) -> Any:
    defaults: dict[str, Any] = {
        "layout": Layout(world_size=2),
        "shape": shape(tied_embeddings=False),
        "optimizer_kind": "adam",
        "decoupled": True,
        "on_cuda": True,
        "has_fused_adam": True,
    }
    surroundings = Surroundings(**(defaults | (around or {})))
    settings = MegatronLMPlugin(**plugin)
    told = nearest_settings(settings, precision, surroundings)
    assert (settings.optimizer_cpu_offload, settings.use_custom_fsdp) == (
        plugin.get(OFFLOAD, False),
        plugin.get("use_custom_fsdp", False),
    ), "the plugin stays as it was"
    if told is None:
        assert settings_problems(settings, precision, surroundings) == []
        return None
    return told.removeprefix("Nearest settings that work: ").removesuffix(".").split("; or ")


def test_settings_that_work_need_no_others() -> None:
    assert nearest(optimizer_cpu_offload=True) is None


def test_what_lacks_another_setting_gets_it_or_goes() -> None:
    assert nearest(**{OVERLAP: True}) == [f"{OVERLAP}=False", f"{OFFLOAD}=True"]
    assert nearest(**{PRECISION_AWARE: True}) == [
        "use_distributed_optimizer=True",
        f"{PRECISION_AWARE}=False",
    ]


def test_only_what_works_where_it_runs_is_named() -> None:
    assert nearest(around={"on_cuda": False}, **{OVERLAP: True}) == [f"{OVERLAP}=False"]
    assert nearest(around={"decoupled": False}, **{OVERLAP: True}) == [f"{OVERLAP}=False"]


def test_two_settings_change_together_where_neither_alone_helps() -> None:
    both = nearest(
        around={"on_cuda": False, "has_fused_adam": False}, **{OVERLAP: True, PRECISION_AWARE: True}
    )

    assert both == [f"{OVERLAP}=False, {PRECISION_AWARE}=False"]


@pytest.mark.parametrize(
    ("precision", "named"),
    [
        ("bf16", ["attention_backend='unfused'", "attention_softmax_in_fp32=True"]),
        (
            "no",
            [
                "attention_softmax_in_fp32=True",
                "attention_backend='unfused', mixed_precision='bf16'",
                "attention_backend='unfused', mixed_precision='fp16'",
            ],
        ),
    ],
)
def test_a_softmax_outside_fp32_gets_what_it_needs(precision: str, named: list[str]) -> None:
    assert nearest(precision, attention_softmax_in_fp32=False) == named
