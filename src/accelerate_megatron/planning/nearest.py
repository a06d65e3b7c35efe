"""The devices, memory and batch nearest to some with which no layout fits. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

from accelerate_megatron.config.nearest import nearest_multiples
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.planning.search import Plan, PlanRequest, some_layout_fits

_MOST_COUNTS = 32
"""Numbers of devices that are tried upwards."""
_GB = 10**9
_T = TypeVar("_T")


def nearest_words(
    family: Family,
    shape: ModelShape,
    request: PlanRequest,
    plans: Sequence[Plan],
    batch_of: Callable[[int], int],
) -> str:
    """Return the flags nearest to the request's with which some layout fits, as a sentence.

    Args:
        family: The model's family.
        shape: The model's shape.
        request: What was asked for.
        plans: The plans for it, none of which fits; without any, no layout divides.
        batch_of: The global batch for a number of devices.
    """
    if request.global_batch_size % request.micro_batch_size:
        choices = nearest_multiples(request.global_batch_size, request.micro_batch_size)
        return (
            f"--global_batch_size {request.global_batch_size} must be a multiple of "
            f"--micro_batch_size {request.micro_batch_size}, such as {choices}."
        )

    def fits(devices: int) -> bool:
        batch = batch_of(devices)
        return some_layout_fits(
            family, shape, replace(request, num_devices=devices, global_batch_size=batch)
        )

    words = []
    if plans:
        least = min(plan.memory.total for plan in plans)
        words.append(f"--memory {_written(least)}")
    else:
        words += _flags(_first(fits, _below(request.num_devices, request.devices_per_node)))
    above = list(islice(_above(request.num_devices, request.devices_per_node), _MOST_COUNTS))
    more = _flags(_first(fits, above))
    listed = "; or ".join(words + more)
    sentence = f"Nearest that works: {listed}." if listed else ""
    if not more:
        sentence += f" Up to {above[-1]} devices, none fits."
    return sentence.strip()


def _first(fits: Callable[[_T], bool], candidates: Iterable[_T]) -> _T | None:
    return next(filter(fits, candidates), None)


def _flags(devices: int | None) -> list[str]:
    return [] if devices is None else [f"--devices {devices}"]


def _below(devices: int, per_node: int) -> Iterator[int]:
    """Yield smaller numbers, largest first: whole nodes, then the devices of one."""
    nodes = range((devices - 1) // per_node * per_node, per_node, -per_node)
    return chain(nodes, range(min(devices - 1, per_node), 0, -1))


def _above(devices: int, per_node: int) -> Iterator[int]:
    """Yield larger numbers without end: those of one node, then whole nodes."""
    yield from range(devices + 1, per_node + 1)
    count = max(per_node, devices) // per_node * per_node
    while True:
        count += per_node
        yield count


def _written(num_bytes: int) -> str:
    """Return bytes as `--memory` takes them, rounded up: in tenths of GB, or of a smaller unit."""
    units = ((_GB, "GB"), (_GB // 1000, "MB"), (_GB // 10**6, "KB"))
    size, name = next(((s, n) for s, n in units if num_bytes >= s), units[-1])
    return f"{-(-num_bytes * 10 // size) / 10:g}{name}"
