"""Plans as a table, as plain values, and drawn. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from accelerate_megatron.planning.search import Plan

GIB = 2**30
_COLUMNS = (
    ("tp", 3),
    ("pp", 3),
    ("cp", 3),
    ("ep", 3),
    ("dp", 4),
    ("micro-batches", 13),
    ("saving", 24),
    ("weights", 8),
    ("grads", 7),
    ("optim", 7),
    ("activ", 7),
    ("total GiB", 9),
    ("bubble", 7),
    ("fits", 4),
)


def table(plans: Sequence[Plan]) -> str:
    """Return the plans as lines of text, one each, under a heading."""
    heading = "  ".join(f"{name:>{width}}" for name, width in _COLUMNS)
    return "\n".join([heading, *(_row(plan) for plan in plans)])


def _row(plan: Plan) -> str:
    layout, memory = plan.layout, plan.memory
    cells = (
        layout.tp_size,
        layout.pp_size,
        layout.cp_size,
        layout.ep_size,
        layout.dp_size,
        plan.work.num_micro_batches,
        _saving(plan),
        f"{memory.parameters / GIB:.2f}",
        f"{memory.gradients / GIB:.2f}",
        f"{memory.optimizer / GIB:.2f}",
        f"{(memory.activations + memory.workspace) / GIB:.2f}",
        f"{memory.total / GIB:.2f}",
        f"{plan.bubble:.0%}",
        "yes" if plan.fits else "no",
    )
    return "  ".join(f"{cell!s:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _saving(plan: Plan) -> str:
    parts = []
    if plan.work.shard_optimizer:
        parts.append("dist. optimizer")
    if plan.work.recompute:
        parts.append("recompute")
    return " + ".join(parts) or "none"


def as_values(plan: Plan) -> dict[str, Any]:
    """Return a plan as values that JSON can hold, bytes as numbers."""
    return {
        "plugin": plugin_arguments(plan),
        "dp_size": plan.layout.dp_size,
        "bytes": {**asdict(plan.memory), "total": plan.memory.total},
        "bubble": plan.bubble,
        "fits": plan.fits,
    }


def plugin_arguments(plan: Plan) -> dict[str, Any]:
    """Return the fields of `MegatronLMPlugin` that ask for this plan, defaults left out."""
    layout = plan.layout
    fields = {
        "tp_degree": (layout.tp_size, 1),
        "pp_degree": (layout.pp_size, 1),
        "pipeline_model_parallel_split_rank": (layout.split_rank, None),
        "context_parallel_size": (layout.cp_size, 1),
        "expert_model_parallel_size": (layout.ep_size, 1),
        "sequence_parallelism": (layout.sequence_parallel, False),
        "num_micro_batches": (plan.work.num_micro_batches, 1),
        "use_distributed_optimizer": (plan.work.shard_optimizer, False),
        "recompute_granularity": (plan.work.recompute, None),
    }
    return {name: value for name, (value, default) in fields.items() if value != default}


def timeline(pp_size: int, num_micro_batches: int) -> str:
    """Draw a 1F1B step: one line a stage, a digit a forward pass, a letter a backward pass.

    A backward pass takes as long as two forward passes. Micro-batches are numbered from 1,
    and lettered from a; a dot is waiting.
    """
    lines = [["."] * _length(pp_size, num_micro_batches) for _ in range(pp_size)]
    for stage, start, length, mark in _passes(pp_size, num_micro_batches):
        for tick in range(start, start + length):
            lines[stage][tick] = mark
    width = len(str(pp_size - 1))
    return "\n".join(f"stage {i:>{width}}  {''.join(line)}" for i, line in enumerate(lines))


_FORWARD, _BACKWARD = 1, 2


def _length(pp_size: int, num_micro_batches: int) -> int:
    return max(start + length for _, start, length, _ in _passes(pp_size, num_micro_batches))


def _passes(pp_size: int, num_micro_batches: int) -> list[tuple[int, int, int, str]]:
    """Return (stage, first tick, ticks, mark) of every pass, each as early as it can be."""
    ended: dict[tuple[str, int, int], int] = {}
    orders = [_order(pp_size, stage, num_micro_batches) for stage in range(pp_size)]
    free = [0] * pp_size
    done = [0] * pp_size
    passes = []
    while any(done[stage] < len(orders[stage]) for stage in range(pp_size)):
        for stage in range(pp_size):
            if done[stage] == len(orders[stage]):
                continue
            kind, batch = orders[stage][done[stage]]
            needed = _needs(kind, batch, stage, pp_size)
            if needed is not None and needed not in ended:
                continue
            start = max(free[stage], ended.get(needed, 0) if needed else 0)
            ticks = _FORWARD if kind == "F" else _BACKWARD
            first = "1" if kind == "F" else "a"
            passes.append((stage, start, ticks, chr(ord(first) + batch)))
            free[stage] = ended[kind, batch, stage] = start + ticks
            done[stage] += 1
    return passes


def _order(pp_size: int, stage: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """Return the passes of a stage in 1F1B order: warm-up, alternation, cool-down."""
    warm_up = min(pp_size - stage - 1, num_micro_batches)
    order = [("F", batch) for batch in range(warm_up)]
    for batch in range(num_micro_batches - warm_up):
        order += [("F", warm_up + batch), ("B", batch)]
    return order + [("B", batch) for batch in range(num_micro_batches - warm_up, num_micro_batches)]


def _needs(kind: str, batch: int, stage: int, pp_size: int) -> tuple[str, int, int] | None:
    """Return the pass that must have ended before this one starts; None: nothing."""
    if kind == "F":
        return None if stage == 0 else ("F", batch, stage - 1)
    return ("F", batch, stage) if stage == pp_size - 1 else ("B", batch, stage + 1)


def rank_grid(tp_size: int, cp_size: int, dp_size: int, pp_size: int) -> str:
    """Draw which rank stands where: a line for each stage and replica, ranks of a replica apart.

    Source: megatron-core 0.16.1, parallel_state.py: ranks are numbered along tp first, then
        cp, dp and pp.
    """
    lines = []
    rank = 0
    for stage in range(pp_size):
        for replica in range(dp_size):
            groups = []
            for _ in range(cp_size):
                groups.append(" ".join(f"{rank + i:>3}" for i in range(tp_size)))
                rank += tp_size
            lines.append(f"pp {stage}  dp {replica}   [{' | '.join(groups)} ]")
    return "\n".join(lines)
