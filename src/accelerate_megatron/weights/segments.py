"""What each kind of correspondence means, in rows. The only place that knows; no torch.

A Megatron parameter is a sequence of row segments: runs of its rows that are runs of rows of
one Hugging Face tensor (read through a transpose where the kind says so). Import and export
both walk these segments, so they cannot drift apart. A bias is a parameter of rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from accelerate_megatron.models.parameters import (
    Direct,
    PackedGateUp,
    PackedKV,
    PackedQKV,
    Parameter,
    SeparateExperts,
    SeparateGateUpExperts,
    StackedExperts,
    StackedQKV,
    Vocabulary,
)
from accelerate_megatron.models.shape import ModelShape


@dataclass(frozen=True)
class RowSegment:
    """The next `length` rows of a Megatron parameter: rows of `hf` from `hf_start`."""

    hf: str
    hf_start: int
    length: int


@dataclass(frozen=True)
class Overlap:
    """The part of one segment that falls into a range of rows, from row `start` of the range."""

    hf: str
    hf_start: int
    length: int
    start: int


def row_segments(parameter: Parameter, shape: ModelShape, *, rows: int) -> list[RowSegment]:
    """Return the segments of a Megatron parameter of `rows` rows, in order and without gaps.

    Args:
        parameter: What the parameter is made of.
        shape: The model.
        rows: Rows of the whole parameter, without the padding of a vocabulary.
    """
    match parameter:
        case Direct(hf) | Vocabulary(hf) | StackedExperts(hf):
            return [RowSegment(hf, 0, rows)]
        case PackedQKV(q, k, v):
            return _qkv_segments(shape, (q, 0), (k, 0), (v, 0))
        case StackedQKV(hf):
            q_rows = shape.num_attention_heads * shape.kv_channels
            k_rows = shape.num_query_groups * shape.kv_channels
            return _qkv_segments(shape, (hf, 0), (hf, q_rows), (hf, q_rows + k_rows))
        case PackedKV(k, v):
            head = shape.kv_channels
            starts = range(0, shape.num_attention_heads * head, head)
            return [RowSegment(name, start, head) for start in starts for name in (k, v)]
        case PackedGateUp(gate, up):
            return [RowSegment(gate, 0, rows // 2), RowSegment(up, 0, rows // 2)]
        case SeparateExperts() | SeparateGateUpExperts():
            return _expert_segments(parameter, shape, rows)


def _expert_segments(
    parameter: SeparateExperts | SeparateGateUpExperts, shape: ModelShape, rows: int
) -> list[RowSegment]:
    """Put expert below expert, each with its gate above its up where it is gated."""
    names = hf_names(parameter)
    num_experts = num_stacked(shape)
    length = rows // num_experts // len(names)
    return [
        RowSegment(name.replace("{expert}", str(expert)), 0, length)
        for expert in range(num_experts)
        for name in names
    ]


def num_stacked(shape: ModelShape) -> int:
    """Return how many experts are stacked in one parameter; 1 without experts."""
    return 1 if shape.experts is None else shape.experts.num_experts


def _qkv_segments(
    shape: ModelShape, q: tuple[str, int], k: tuple[str, int], v: tuple[str, int]
) -> list[RowSegment]:
    """Interleave queries, keys and values group by group: `q1 q2 k1 v1 | q3 q4 k2 v2 | ...`.

    Each of q, k and v is a Hugging Face name and the row at which that projection starts. With
    g groups, p query heads per group and head size d, a group is p*d + d + d rows.

    Source: megatron-core 0.16.1, transformer/attention.py,
        SelfAttention.get_query_key_value_tensors.
    """
    head = shape.kv_channels
    queries = shape.num_attention_heads // shape.num_query_groups * head
    segments = []
    for group in range(shape.num_query_groups):
        for (name, start), length in ((q, queries), (k, head), (v, head)):
            segments.append(RowSegment(name, start + group * length, length))
    return segments


def is_transposed(parameter: Parameter) -> bool:
    """Whether the Hugging Face tensors are [in, out] where Megatron has [out, in]."""
    match parameter:
        case Direct(transposed=transposed) | StackedQKV(transposed=transposed):
            return transposed
        case _:
            return False


def is_in_fp32(parameter: Parameter) -> bool:
    """Whether the Hugging Face tensor is fp32 in a model of any dtype."""
    return isinstance(parameter, Direct) and parameter.in_fp32


def is_stacked(parameter: Parameter) -> bool:
    """Whether the Hugging Face tensor has a dim of experts before its rows."""
    return isinstance(parameter, StackedExperts)


def is_padded(parameter: Parameter) -> bool:
    """Whether Megatron's tensor may have rows of zeros after the last segment."""
    return isinstance(parameter, Vocabulary)


def hf_names(parameter: Parameter) -> tuple[str, ...]:
    """Return the Hugging Face names that a parameter is made of, in Megatron's order."""
    match parameter:
        case (
            Direct(hf) | Vocabulary(hf) | StackedQKV(hf) | StackedExperts(hf) | SeparateExperts(hf)
        ):
            return (hf,)
        case PackedQKV(q, k, v):
            return (q, k, v)
        case PackedKV(k, v):
            return (k, v)
        case PackedGateUp(gate, up) | SeparateGateUpExperts(gate, up):
            return (gate, up)


def overlaps(segments: Sequence[RowSegment], start: int, stop: int) -> Iterator[Overlap]:
    """Yield what rows `start` to `stop` of a parameter are made of, in order.

    Rows after the last segment (the padding of a vocabulary) yield nothing.
    """
    row = 0
    for segment in segments:
        first, last = max(row, start), min(row + segment.length, stop)
        if first < last:
            yield Overlap(
                hf=segment.hf,
                hf_start=segment.hf_start + first - row,
                length=last - first,
                start=first - start,
            )
        row += segment.length
