"""The layouts that a model can run in on a number of devices, best first. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.nearest import degrees
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.planning.activations import Workload
from accelerate_megatron.planning.bubble import bubble_share
from accelerate_megatron.planning.memory import RankMemory, rank_memory
from accelerate_megatron.planning.parameters import stage_parameters


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be trained on what."""

    num_devices: int
    memory_bytes: int | None
    """Of one device; None: any amount."""
    global_batch_size: int
    micro_batch_size: int
    seq_length: int
    precision: str
    decoder_seq_length: int | None = None
    """Of a decoder beside an encoder; None: as long as the encoder's."""
    devices_per_node: int = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout and what it costs."""

    layout: Layout
    work: Workload
    memory: RankMemory
    """Of the rank that needs the most."""
    bubble: float
    fits: bool

    @property
    def rank(self) -> tuple[float, ...]:
        """Sorts plans, best first.

        What fits comes first. Then the less a layout waits and talks the better:
        recomputation costs a third of the work; tensor parallelism talks in every layer,
        and slowly between nodes; context and pipeline parallelism talk less.
        """
        layout = self.layout
        work_added = 1 / 3 if self.work.recompute == "full" else 0.0
        talk = 0.04 * (layout.tp_size - 1) + 0.02 * (layout.cp_size - 1)
        talk += 0.01 * (layout.ep_size - 1)
        return (
            not self.fits,
            (1 + work_added + talk) / (1 - self.bubble),
            self.memory.total,
        )


def find_plans(family: Family, shape: ModelShape, request: PlanRequest) -> list[Plan]:
    """Return every legal layout with the least memory saving that fits it, best first.

    A layout that fits in no way is returned with the most saving there is.
    """
    plans = [_best_of_layout(family, shape, layout, request) for layout in _legal(shape, request)]
    return sorted(plans, key=lambda plan: plan.rank)


def some_layout_fits(family: Family, shape: ModelShape, request: PlanRequest) -> bool:
    """Return whether any legal layout fits, with all the memory saving there is."""
    layouts = _legal(shape, request)
    if request.memory_bytes is None:
        return next(layouts, None) is not None
    most = _SAVINGS[-1]
    return any(
        _plan(family, shape, layout, _workload(layout, request, most), request).fits
        for layout in layouts
    )


def _legal(shape: ModelShape, request: PlanRequest) -> Iterator[Layout]:
    experts = None if shape.experts is None else shape.experts.num_experts
    for sizes in degrees(request.num_devices, experts):
        if sizes["tp_size"] > request.devices_per_node:
            continue
        for split in _splits(shape, sizes["pp_size"]):
            layout = Layout(
                world_size=request.num_devices,
                sequence_parallel=sizes["tp_size"] > 1,
                split_rank=split,
                **sizes,
            )
            if _is_legal(layout, shape, request):
                yield layout


def _splits(shape: ModelShape, pp_size: int) -> Iterable[int | None]:
    """Return the stages at which a decoder beside an encoder can begin; None where none does."""
    return [None] if shape.encoder_decoder is None or pp_size == 1 else range(1, pp_size)


def _is_legal(layout: Layout, shape: ModelShape, request: PlanRequest) -> bool:
    micro_batches = _num_micro_batches(layout, request)
    lengths = (request.seq_length, request.decoder_seq_length or request.seq_length)
    if micro_batches is None or any(length % layout.sequence_multiple for length in lengths):
        return False
    return not (layout.world_problems() or layout.model_problems(shape, micro_batches))


def _num_micro_batches(layout: Layout, request: PlanRequest) -> int | None:
    rows = layout.dp_size * request.micro_batch_size
    return request.global_batch_size // rows if request.global_batch_size % rows == 0 else None


_SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    {"shard_optimizer": True},
    {"shard_optimizer": True, "recompute": "full"},
)
"""From the cheapest in time to the dearest."""


def _best_of_layout(
    family: Family, shape: ModelShape, layout: Layout, request: PlanRequest
) -> Plan:
    candidates = []
    for saving in _SAVINGS:
        if saving == {"shard_optimizer": True} and layout.dp_size * layout.cp_size == 1:
            continue
        plan = _plan(family, shape, layout, _workload(layout, request, saving), request)
        if plan.fits:
            return plan
        candidates.append(plan)
    return candidates[-1]


def _workload(layout: Layout, request: PlanRequest, saving: Mapping[str, Any]) -> Workload:
    return Workload(
        precision=request.precision,
        micro_batch_size=request.micro_batch_size,
        seq_length=request.seq_length,
        decoder_seq_length=request.decoder_seq_length,
        num_micro_batches=_num_micro_batches(layout, request) or 1,
        **saving,
    )


def _plan(
    family: Family, shape: ModelShape, layout: Layout, work: Workload, request: PlanRequest
) -> Plan:
    worst = max(
        (
            rank_memory(shape, layout, stage, stage_parameters(family, shape, layout, stage), work)
            for stage in range(layout.pp_size)
        ),
        key=lambda memory: memory.total,
    )
    return Plan(
        layout=layout,
        work=work,
        memory=worst,
        bubble=bubble_share(layout.pp_size, work.num_micro_batches),
        fits=request.memory_bytes is None or worst.total <= request.memory_bytes,
    )
