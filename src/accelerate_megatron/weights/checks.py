"""Whether weights, shards and a model fit each other; all problems of one kind at once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.models.megatron_shapes import TensorShape
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.placements import Placement, expected_hf_shapes
from accelerate_megatron.weights.shards import ParameterShard
from accelerate_megatron.weights.source import TensorSource


def check_source(source: TensorSource, table: Mapping[str, Parameter], shape: ModelShape) -> None:
    """Check that a source holds the tensors that this model needs, and no others.

    Reads no tensor and communicates with nobody: call it on every rank before any collective,
    so that wrong weights fail everywhere at once.

    Raises:
        WeightsError: Tensors are missing, left over or of another shape; lists all of them.
    """
    expected = expected_hf_shapes(table, shape)
    found = set(source.names())
    problems = [
        f"{len(names)} {title}: {', '.join(collapse_layers(names))}"
        for title, names in (
            ("missing", expected.keys() - found),
            ("not used", found - expected.keys()),
        )
        if names
    ]
    problems += _shape_problems(source, expected, found)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise WeightsError(
            f"The weights of {source.label} do not fit this {shape.model_type} model:{listed}\n"
            "Check that the config belongs to these weights."
        )


def _shape_problems(
    source: TensorSource, expected: Mapping[str, TensorShape], found: set[str]
) -> list[str]:
    wrong: defaultdict[tuple[TensorShape, TensorShape], list[str]] = defaultdict(list)
    for name, wanted in expected.items():
        if name in found and source.shape(name) != wanted:
            wrong[source.shape(name), wanted].append(name)
    return [
        f"of shape {list(got)} where the config says {list(wanted)}: "
        f"{', '.join(collapse_layers(names))}"
        for (got, wanted), names in wrong.items()
    ]


def check_shards(shards: Iterable[ParameterShard], placed: Mapping[str, Placement]) -> None:
    """Check that each shard lies inside a parameter that the table places.

    Raises:
        WeightsError: A shard does not; lists all of them.
    """
    problems = [
        problem for shard in shards for problem in _shard_problems(shard, placed.get(shard.name))
    ]
    if problems:
        raise WeightsError(
            "The model's parameters do not fit the table of its family:"
            + "".join(f"\n  - {problem}" for problem in problems)
        )


def _shard_problems(shard: ParameterShard, placement: Placement | None) -> list[str]:
    if placement is None:
        return [f"{shard.name} is not in the table"]
    problems = global_shape_problems(shard.name, shard.global_shape, placement)
    dims = (len(shard.global_shape), len(shard.global_offset), shard.data.dim())
    if len(set(dims)) > 1 or any(
        start + size > whole
        for start, size, whole in zip(
            shard.global_offset, shard.data.shape, shard.global_shape, strict=True
        )
    ):
        problems.append(
            f"the piece of {shard.name} at {list(shard.global_offset)} of shape "
            f"{list(shard.data.shape)} leaves its whole of shape {list(shard.global_shape)}"
        )
    return problems


def global_shape_problems(name: str, global_shape: TensorShape, placement: Placement) -> list[str]:
    """Say whether a whole parameter has the shape that the table gives it; a list of 0 or 1."""
    fits = global_shape == placement.shape or (
        placement.padded
        and global_shape[1:] == placement.shape[1:]
        and global_shape[0] > placement.shape[0]
    )
    if fits:
        return []
    padding = " (or more rows)" if placement.padded else ""
    return [
        f"{name} is of shape {list(global_shape)} where the table says "
        f"{list(placement.shape)}{padding}"
    ]


def collapse_layers(names: Iterable[str]) -> list[str]:
    """Return `names` sorted, with those that differ in their layer only written as one.

    `model.layers.0.norm`, `model.layers.1.norm` become `model.layers.{0-1}.norm`.
    """
    layers: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    plain: list[str] = []
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        if number is None:
            plain.append(name)
        else:
            layers[name[: number.start()], name[number.end() :]].append(int(number.group()))
    return sorted(
        [
            *plain,
            *(f"{head}{_ranges(sorted(found))}{tail}" for (head, tail), found in layers.items()),
        ]
    )


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(numbers) == 1:
        return str(numbers[0])
    written = (str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return "{" + ",".join(written) + "}"
