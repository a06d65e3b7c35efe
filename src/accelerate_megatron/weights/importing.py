"""Copying Hugging Face weights into a rank's shards, slice by slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.bars import progress_bar
from accelerate_megatron.weights.checks import check_shards, check_source
from accelerate_megatron.weights.placements import Placement, placements
from accelerate_megatron.weights.segments import overlaps
from accelerate_megatron.weights.shards import ParameterShard
from accelerate_megatron.weights.source import TensorSource


def import_weights(
    shards: Iterable[ParameterShard],
    source: TensorSource,
    table: Mapping[str, Parameter],
    shape: ModelShape,
    *,
    shows_progress: bool = False,
) -> None:
    """Fill this rank's shards from a source, in the shards' dtype and on their device.

    Reads exactly the slices that the shards hold; no whole packed parameter is ever made.
    Communicates with nobody. Padded rows of a vocabulary become zero.

    Args:
        shards: Those of this rank, replicas included.
        source: The weights.
        table: The family's, for this shape.
        shape: The model.
        shows_progress: Whether one rank of the job shows a bar, on a terminal.

    Raises:
        WeightsError: The source does not fit the model, or a shard the table. Nothing has been
            written then.
    """
    shards = list(shards)
    placed = placements(table, shape)
    check_source(source, table, shape)
    check_shards(shards, placed)
    with torch.no_grad():
        for shard in progress_bar(shards, "importing weights", shown=shows_progress):
            _fill(shard, placed[shard.name], source)


def _fill(shard: ParameterShard, placement: Placement, source: TensorSource) -> None:
    first, rows = shard.global_offset[0], shard.data.shape[0]
    others = tuple(
        slice(start, start + size)
        for start, size in zip(shard.global_offset[1:], shard.data.shape[1:], strict=True)
    )
    filled = 0
    for part in overlaps(placement.segments, first, first + rows):
        hf_rows = slice(part.hf_start, part.hf_start + part.length)
        piece = source.read(part.hf, placement.hf_index(hf_rows, others))
        piece = piece.flatten(0, 1) if placement.stacked is not None else piece
        piece = piece.t() if placement.transposed else piece
        target = shard.data[filled : filled + part.length]
        # copy_ would broadcast a slice that came out too small.
        if part.start != filled or piece.shape != target.shape:
            raise WeightsError(
                f"{source.label} gave {list(piece.shape)} for rows {hf_rows.start} to "
                f"{hf_rows.stop} of {part.hf}; {shard.name} takes {list(target.shape)} there."
            )
        target.copy_(piece)
        filled += part.length
    num_padding = max(0, first + rows - max(first, placement.rows))
    if filled + num_padding != rows:
        raise WeightsError(
            f"{filled} of the {rows - num_padding} rows of {shard.name} from row {first} were "
            "written; the model family's table is wrong."
        )
    shard.data[filled:].zero_()
