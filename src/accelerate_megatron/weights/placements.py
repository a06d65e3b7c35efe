"""A family's table written out for one model: every layer, every row, every shape. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.models.megatron_shapes import (
    TensorShape,
    is_in_layer,
    megatron_shape,
    num_layers_of,
)
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.segments import (
    RowSegment,
    is_in_fp32,
    is_padded,
    is_stacked,
    is_transposed,
    num_stacked,
    row_segments,
)


@dataclass(frozen=True)
class Placement:
    """Where the rows of one Megatron parameter are in Hugging Face tensors."""

    shape: TensorShape
    """Shape of the whole Megatron parameter, without the padding of a vocabulary."""
    segments: tuple[RowSegment, ...]
    transposed: bool
    """Whether the Hugging Face tensors are [in, out] where Megatron has [out, in]."""
    padded: bool
    """Whether Megatron's tensor may have rows of zeros after the last segment."""
    stacked: int | None = None
    """Experts that the Hugging Face tensor has as its first dim; None: it has no such dim."""
    in_fp32: bool = False
    """Whether the Hugging Face tensor is fp32 in a model of any dtype."""

    @property
    def rows(self) -> int:
        """Rows of the whole parameter, without padding."""
        return self.shape[0]

    def hf_index(self, rows: slice, others: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the index into a Hugging Face tensor of Megatron's rows and other dims.

        With `stacked`, the rows are those of one expert, and what is indexed keeps its dim.
        """
        if self.stacked is not None:
            expert, first = divmod(rows.start, self.rows // self.stacked)
            within = slice(first, first + rows.stop - rows.start)
            return (slice(expert, expert + 1), within, *others)
        return (*others, rows) if self.transposed else (rows, *others)

    def hf_shapes(self) -> dict[str, TensorShape]:
        """Return the shapes of the Hugging Face tensors, in the order of their first rows."""
        rows: Counter[str] = Counter()
        for segment in self.segments:
            rows[segment.hf] += segment.length
        others = self.shape[1:]
        if self.stacked is not None:
            return {
                name: (self.stacked, count // self.stacked, *others) for name, count in rows.items()
            }
        return {
            name: (*others, count) if self.transposed else (count, *others)
            for name, count in rows.items()
        }


def placements(table: Mapping[str, Parameter], shape: ModelShape) -> dict[str, Placement]:
    """Return the placement of each parameter of a model, by its canonical Megatron name.

    The order is the table's, layer by layer where the table goes through a layer.

    Raises:
        WeightsError: The table is wrong: a row of a Hugging Face tensor has no place or two.
    """
    placed: dict[str, Placement] = {}
    for name, layer in _names_with_layers(table, shape):
        parameter = table[name]
        whole = megatron_shape(name, shape)
        placed[name.format(layer=layer)] = Placement(
            shape=whole,
            segments=tuple(
                RowSegment(segment.hf.format(layer=layer), segment.hf_start, segment.length)
                for segment in row_segments(parameter, shape, rows=whole[0])
            ),
            transposed=is_transposed(parameter),
            padded=is_padded(parameter),
            stacked=num_stacked(shape) if is_stacked(parameter) else None,
            in_fp32=is_in_fp32(parameter),
        )
    _check_each_row_has_one_place(placed)
    return placed


def expected_hf_shapes(table: Mapping[str, Parameter], shape: ModelShape) -> dict[str, TensorShape]:
    """Return the Hugging Face tensors that a model consists of, with their shapes.

    Needs neither weights nor ranks, so every rank can compare a source with it before any
    collective.
    """
    return {
        name: hf_shape
        for placement in placements(table, shape).values()
        for name, hf_shape in placement.hf_shapes().items()
    }


def _names_with_layers(
    table: Mapping[str, Parameter], shape: ModelShape
) -> Iterator[tuple[str, int | None]]:
    def layers_of(name: str) -> int | None:
        return num_layers_of(name, shape) if "{layer}" in name else None

    def stack_of(name: str) -> tuple[str, int | None]:
        return name.split(".")[0], layers_of(name)

    for (_, num_layers), names in groupby(table, key=stack_of):
        if num_layers is not None:
            run = list(names)
            for layer in range(num_layers):
                yield from ((name, layer) for name in run if is_in_layer(name, layer, shape))
        else:
            yield from ((name, None) for name in names)


def _check_each_row_has_one_place(placed: Mapping[str, Placement]) -> None:
    owner: dict[str, str] = {}
    for name, placement in placed.items():
        if sum(segment.length for segment in placement.segments) != placement.rows:
            raise WeightsError(
                f"The segments of {name} do not add up to its {placement.rows} rows; "
                "the model family's table is wrong."
            )
        next_row: dict[str, int] = {}
        for segment in sorted(placement.segments, key=lambda segment: segment.hf_start):
            if segment.hf_start != next_row.get(segment.hf, 0):
                raise WeightsError(
                    f"Row {segment.hf_start} of {segment.hf} has no place or two in {name}; "
                    "the model family's table is wrong."
                )
            next_row[segment.hf] = segment.hf_start + segment.length
        for hf in next_row:
            if hf in owner:
                raise WeightsError(
                    f"{hf} is in {owner[hf]} and in {name}; the model family's table is wrong."
                )
            owner[hf] = name
