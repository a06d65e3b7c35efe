"""Assembling Hugging Face tensors from the shards of all ranks, one Megatron tensor at a time.

Every rank derives the same plan from the same descriptions, then walks it: owners send, the
writer receives and puts rows where the segments say. Packed parameters are never put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.models.megatron_shapes import TensorShape
from accelerate_megatron.weights.checks import collapse_layers, global_shape_problems
from accelerate_megatron.weights.holders import ModelHolders
from accelerate_megatron.weights.placements import Placement
from accelerate_megatron.weights.segments import overlaps
from accelerate_megatron.weights.shards import ParameterShard


@dataclass(frozen=True)
class Piece:
    """A main replica on some rank, without its values."""

    name: str
    owner: int
    """The rank that holds it."""
    index: int
    """Its position among that rank's main replicas."""
    shape: TensorShape
    offset: TensorShape
    global_shape: TensorShape
    dtype: torch.dtype

    def overlaps(self, other: Piece) -> bool:
        """Whether two pieces of one parameter have an element in common."""
        return all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )


@dataclass(frozen=True)
class GatherPlan:
    """What is sent to the writer, in order, and what comes of it. The same on every rank."""

    placed: Mapping[str, Placement]
    pieces: Mapping[str, Sequence[Piece]]
    """The pieces of each Megatron parameter."""
    dtype: torch.dtype | None = None
    """Of the Hugging Face tensors; None: that of the model, which is its embedding's."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of the Hugging Face tensors that come of a Megatron parameter.

        Routers are fp32 in Megatron's bf16 models, and in some of Hugging Face's.
        """
        if self.placed[name].in_fp32:
            return torch.float32
        return self.dtype or next(iter(self.pieces.values()))[0].dtype

    def hf_tensors(self) -> dict[str, tuple[TensorShape, torch.dtype]]:
        """Return the shape and dtype of every Hugging Face tensor, in the order of completion."""
        return {
            hf: (hf_shape, self.dtype_of(name))
            for name in self.pieces
            for hf, hf_shape in self.placed[name].hf_shapes().items()
        }


def make_plan(
    shards: Sequence[ParameterShard],
    placed: Mapping[str, Placement],
    *,
    dtype: torch.dtype | None,
    ranks: ModelHolders,
) -> GatherPlan:
    """Agree on what is sent to the writer. Every rank must call it.

    Raises:
        WeightsError: The shards of all ranks are not exactly the parameters of the table. All
            ranks raise the same error.
    """
    described = ranks.all_gather(_describe(shards, ranks.rank))
    pieces: dict[str, list[Piece]] = {name: [] for name in placed}
    unknown = set()
    for piece in (piece for own in described for piece in own):
        if piece.name in pieces:
            pieces[piece.name].append(piece)
        else:
            unknown.add(piece.name)
    problems = [f"not in the table: {', '.join(collapse_layers(unknown))}"] if unknown else []
    for name, found in pieces.items():
        problems += _tiling_problems(name, found, placed[name])
    if problems:
        raise WeightsError(
            "The parameters of the model's ranks do not make up the model:"
            + "".join(f"\n  - {problem}" for problem in problems)
        )
    return GatherPlan(placed=placed, pieces=pieces, dtype=dtype)


def _main_replicas(shards: Sequence[ParameterShard]) -> list[ParameterShard]:
    return [shard for shard in shards if shard.is_main_replica]


def _describe(shards: Sequence[ParameterShard], rank: int) -> list[Piece]:
    return [
        Piece(
            name=shard.name,
            owner=rank,
            index=index,
            shape=tuple(shard.data.shape),
            offset=tuple(shard.global_offset),
            global_shape=tuple(shard.global_shape),
            dtype=shard.data.dtype,
        )
        for index, shard in enumerate(_main_replicas(shards))
    ]


def _tiling_problems(name: str, pieces: Sequence[Piece], placement: Placement) -> list[str]:
    """Say why `pieces` are not one whole parameter, each element once; empty when they are."""
    if not pieces:
        return [f"no rank holds {name}"]
    shapes = {piece.global_shape for piece in pieces}
    dtypes = sorted({str(piece.dtype) for piece in pieces})
    if len(shapes) > 1 or len(dtypes) > 1:
        return [
            f"the ranks disagree on {name}: shapes {sorted(shapes)}, dtypes {', '.join(dtypes)}"
        ]
    problems = global_shape_problems(name, pieces[0].global_shape, placement)
    held = sum(prod(piece.shape) for piece in pieces)
    if held < prod(pieces[0].global_shape):
        problems.append(
            f"the ranks hold {held} of the {prod(pieces[0].global_shape)} elements of {name}"
        )
    for one, other in combinations(pieces, 2):
        if one.overlaps(other):
            problems.append(
                f"ranks {one.owner} and {other.owner} both hold elements of {name}, from "
                f"{list(one.offset)} and from {list(other.offset)}"
            )
    return problems


def stream_hf_tensors(
    shards: Sequence[ParameterShard], plan: GatherPlan, ranks: ModelHolders
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield complete Hugging Face tensors, on the CPU of the writer; empty dicts elsewhere.

    Every rank must take every item, in step with the others: taking one communicates. The
    writer holds the tensors of one Megatron parameter and one piece at a time.
    """
    main = _main_replicas(shards)
    for name, pieces in plan.pieces.items():
        placement, dtype = plan.placed[name], plan.dtype_of(name)
        tensors = {
            hf: torch.empty(hf_shape, dtype=dtype)
            for hf, hf_shape in placement.hf_shapes().items()
            if ranks.is_writer
        }
        for piece in pieces:
            rows = min(piece.shape[0], placement.rows - piece.offset[0])
            if rows <= 0:
                continue  # Nothing but a vocabulary's padding.
            values = _to_writer(main, piece, rows, dtype, ranks)
            if values is not None:
                _put(values, piece.offset, placement, tensors)
        yield tensors


def _to_writer(
    main: Sequence[ParameterShard], piece: Piece, rows: int, dtype: torch.dtype, ranks: ModelHolders
) -> torch.Tensor | None:
    """Move the first `rows` rows of a piece to the writer's CPU; None on the other ranks."""
    if ranks.rank == piece.owner:
        values = main[piece.index].data.detach()[:rows].to(dtype)
        if ranks.is_writer:
            return values.cpu()
        ranks.send_to_writer(values)
        return None
    if ranks.is_writer:
        return ranks.receive(piece.owner, (rows, *piece.shape[1:]), dtype)
    return None


def _put(
    values: torch.Tensor,
    offset: TensorShape,
    placement: Placement,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Copy rows of a Megatron parameter, from `offset` on, into its Hugging Face tensors."""
    others = tuple(
        slice(start, start + size) for start, size in zip(offset[1:], values.shape[1:], strict=True)
    )
    for part in overlaps(placement.segments, offset[0], offset[0] + values.shape[0]):
        hf_rows = slice(part.hf_start, part.hf_start + part.length)
        rows = values[part.start : part.start + part.length]
        target = tensors[part.hf][placement.hf_index(hf_rows, others)]
        target.copy_(rows.t() if placement.transposed else rows)
