"""The fp32 copies that an optimizer keeps of bf16 parameters, seen as shards of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from accelerate_megatron.engine.build import model_shards
from accelerate_megatron.engine.fully_sharded import FullySharded
from accelerate_megatron.engine.shards import Shard, shards_of_module

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""


def main_copy_shards(chunks: Iterable[torch.nn.Module], optimizer: Any) -> list[Shard]:
    """Return the shards of the model with the optimizer's fp32 copies as their data. Views.

    A parameter without a copy (it is fp32 itself, or frozen) stands for itself. A distributed
    optimizer has each copy on one data-parallel rank, cut anywhere: such a shard comes as up to
    three rectangles, and every data-parallel rank speaks for its own.
    """
    shards: list[Shard] = []
    for chunk in chunks:
        if isinstance(chunk, FullySharded):
            shards += chunk.shards(main_copies=True)
            continue
        split = shards_of_module(chunk, is_split=True)
        for shard, if_split in zip(model_shards([chunk]), split, strict=True):
            if getattr(shard.parameter, "main_param_sharded", False):
                shards += _parts(if_split, shard.parameter, optimizer)
            else:
                shards.append(_copy_of(shard))
    return shards


def _copy_of(shard: Shard) -> Shard:
    copy = getattr(shard.parameter, "main_param", None)
    if copy is None:
        return shard
    start = _start(shard)
    values = copy.detach().flatten()[start : start + shard.data.numel()]
    return replace(shard, data=values.view(shard.data.shape))


def _start(shard: Shard) -> int:
    """Return where a shard's data starts in its parameter, counted in elements."""
    return int(shard.data.storage_offset() - shard.parameter.storage_offset())


def _parts(shard: Shard, parameter: torch.Tensor, optimizer: Any) -> Iterator[Shard]:
    owned = _owned_range(parameter, optimizer)
    copy = getattr(parameter, "main_param", None)
    if owned is None or copy is None:
        return
    start = _start(shard)
    first = max(owned.start - start, 0)
    last = min(owned.end - start, shard.data.numel())
    for offset, size in rectangles(tuple(shard.data.shape), first, last):
        at = start + _flat(offset, tuple(shard.data.shape)) - owned.start
        count = torch.Size(size).numel()
        yield replace(
            shard,
            data=copy.detach().flatten()[at : at + count].view(size),
            global_offset=tuple(a + b for a, b in zip(shard.global_offset, offset, strict=True)),
        )


def _owned_range(parameter: torch.Tensor, optimizer: Any) -> Any:
    """Return the range of a parameter's elements that this rank's optimizer updates, or None.

    Source: megatron-core 0.16.1, optimizer/distrib_optimizer.py, `_get_model_param_range_map`.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        place = getattr(part, "model_param_gbuf_map", {}).get(parameter)
        if place is not None:
            buffer, dtype, bucket = place
            owned = part.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
            return None if owned is None else owned["param"]
    return None


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    """Return the parts of a tensor that elements `start` to `stop` of its flat form make up.

    A tensor of two dims gives up to three: the end of a row, whole rows, the start of a row.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    width = shape[1]
    (first, column), (last, end) = divmod(start, width), divmod(stop, width)
    if first == last:
        return [((first, column), (1, end - column))]
    parts: list[Rectangle] = []
    if column:
        parts.append(((first, column), (1, width - column)))
        first += 1
    if last > first:
        parts.append(((first, 0), (last - first, width)))
    if end:
        parts.append(((last, 0), (1, end)))
    return parts


def _flat(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return offset[0] if len(shape) == 1 else offset[0] * shape[1] + offset[1]
