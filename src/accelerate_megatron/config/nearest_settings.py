"""Settings of memory and precision: what they exclude, and those that work nearest. No torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from accelerate_megatron.config.attention import softmax_problems
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.memory_savers import (
    fsdp_precision_problems,
    fsdp_problems,
    offload_problems,
    precision_aware_problems,
)
from accelerate_megatron.models.shape import ModelShape

_SHOWN = 3
_MOST_CHANGES = 3
_PRECISION = "mixed_precision"
_CHANGES: tuple[dict[str, Any], ...] = (
    {"overlap_cpu_optimizer_d2h_h2d": False},
    {"optimizer_cpu_offload": True},
    {"optimizer_cpu_offload": False},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": False},
    {"use_custom_fsdp": False, "use_distributed_optimizer": True},
    {"use_precision_aware_optimizer": False},
    {"attention_backend": "unfused"},
    {"attention_softmax_in_fp32": True},
    {_PRECISION: "bf16"},
    {_PRECISION: "fp16"},
    {_PRECISION: "no"},
)
"""What can be changed, each with what takes its place; those named first are tried first."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What such settings are judged by, besides each other."""

    layout: Layout
    shape: ModelShape
    optimizer_kind: str | None
    """"adam" or "sgd"; None without an optimizer."""
    decoupled: bool
    """Whether its weight decay is AdamW's."""
    on_cuda: bool
    has_fused_adam: bool
    """Whether Transformer Engine is there and used."""


def settings_problems(plugin: Any, precision: str, around: Surroundings) -> list[str]:
    """Return why the plugin's settings of memory and precision cannot be; empty when they can.

    What fully sharded data parallelism excludes of layout and model is in `model_problems`.
    """
    return [
        *softmax_problems(plugin, around.shape, precision),
        *offload_problems(
            plugin,
            optimizer_kind=around.optimizer_kind,
            decoupled=around.decoupled,
            on_cuda=around.on_cuda,
        ),
        *fsdp_precision_problems(plugin, around.shape, precision),
        *precision_aware_problems(plugin, has_fused_adam=around.has_fused_adam),
    ]


def nearest_settings(plugin: Any, precision: str, around: Surroundings) -> str | None:
    """Return a sentence with up to three changes of settings after which they work, fewest first.

    None: the settings work as they are, or no such change helps.
    """

    def work(changed: Any, precision: str) -> bool:
        return not (
            settings_problems(changed, precision, around)
            or fsdp_problems(changed, around.layout, around.shape)
        )

    if work(plugin, precision):
        return None
    asked = copy.copy(plugin)
    setattr(asked, _PRECISION, precision)
    named: list[dict[str, Any]] = []
    for changes in _combined(asked):
        if any(known.items() <= changes.items() for known in named):
            continue
        changed = copy.copy(asked)
        for name, value in changes.items():
            setattr(changed, name, value)
        if work(changed, getattr(changed, _PRECISION)):
            named.append(changes)
    listed = "; or ".join(
        ", ".join(f"{name}={value!r}" for name, value in changes.items())
        for changes in islice(named, _SHOWN)
    )
    return f"Nearest settings that work: {listed}." if named else None


def _combined(asked: Any) -> Iterator[dict[str, Any]]:
    """Yield what differs from `asked` after one change, after two, ..."""
    for number in range(1, _MOST_CHANGES + 1):
        for chosen in combinations(_CHANGES, number):
            wanted = [item for change in chosen for item in change.items()]
            changes = {name: value for name, value in wanted if getattr(asked, name) != value}
            is_contradiction = len(dict(wanted)) < len(set(wanted))
            if changes and not is_contradiction:
                yield changes
