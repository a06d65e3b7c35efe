from __future__ import annotations

from types import SimpleNamespace

import pytest

from accelerate_megatron.models.parameters import (
    Direct,
    PackedGateUp,
    PackedQKV,
    StackedQKV,
    Vocabulary,
)
from accelerate_megatron.weights.segments import (
    Overlap,
    RowSegment,
    hf_names,
    is_padded,
    is_transposed,
    overlaps,
    row_segments,
)

# 4 query heads in 2 groups, heads of 3 channels: 12 q rows, 6 k rows, 6 v rows.
SHAPE = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=3)
PACKED = PackedQKV(q="q", k="k", v="v")
STACKED = StackedQKV("qkv", transposed=True)


def _rows(segments):
    """Every row written out as (tensor, row of it)."""
    return [(s.hf, s.hf_start + row) for s in segments for row in range(s.length)]


@pytest.mark.parametrize("parameter", [Direct("a"), Vocabulary("a")], ids=["direct", "vocabulary"])
def test_one_tensor_is_one_segment(parameter):
    assert row_segments(parameter, SHAPE, rows=7) == [RowSegment("a", 0, 7)]


def test_packed_qkv_goes_group_by_group():
    # q1 q2 k1 v1 | q3 q4 k2 v2, three rows each.
    expected = (
        [("q", row) for row in range(6)]
        + [("k", row) for row in range(3)]
        + [("v", row) for row in range(3)]
        + [("q", row) for row in range(6, 12)]
        + [("k", row) for row in range(3, 6)]
        + [("v", row) for row in range(3, 6)]
    )

    assert _rows(row_segments(PACKED, SHAPE, rows=24)) == expected


def test_stacked_qkv_is_the_same_packing_out_of_one_tensor():
    first_row = {"q": 0, "k": 12, "v": 18}
    expected = [
        ("qkv", first_row[name] + row) for name, row in _rows(row_segments(PACKED, SHAPE, rows=24))
    ]

    assert _rows(row_segments(STACKED, SHAPE, rows=24)) == expected


def test_gate_is_above_up():
    segments = row_segments(PackedGateUp(gate="gate", up="up"), SHAPE, rows=10)

    assert segments == [RowSegment("gate", 0, 5), RowSegment("up", 0, 5)]


@pytest.mark.parametrize(
    ("parameter", "transposed", "padded", "names"),
    [
        pytest.param(Direct("a"), False, False, ("a",), id="direct"),
        pytest.param(Direct("a", transposed=True), True, False, ("a",), id="direct-transposed"),
        pytest.param(Vocabulary("a"), False, True, ("a",), id="vocabulary"),
        pytest.param(PACKED, False, False, ("q", "k", "v"), id="packed-qkv"),
        pytest.param(STACKED, True, False, ("qkv",), id="stacked-qkv"),
        pytest.param(PackedGateUp("g", "u"), False, False, ("g", "u"), id="gate-up"),
    ],
)
def test_each_kind_says_how_it_is_read(parameter, transposed, padded, names):
    assert is_transposed(parameter) is transposed
    assert is_padded(parameter) is padded
    assert hf_names(parameter) == names


@pytest.mark.parametrize("start", range(26))
def test_the_overlaps_of_a_range_are_its_rows_in_order(start):
    segments = row_segments(PACKED, SHAPE, rows=24)
    whole = _rows(segments)

    for stop in range(start, 27):
        found = list(overlaps(segments, start, stop))

        assert _rows(found) == whole[start:stop]
        positions = [part.start + row for part in found for row in range(part.length)]
        assert positions == list(range(len(whole[start:stop])))


def test_rows_after_the_last_segment_are_no_overlap():
    assert list(overlaps([RowSegment("a", 0, 5)], 3, 9)) == [Overlap("a", 3, 2, 0)]
    assert list(overlaps([RowSegment("a", 0, 5)], 5, 9)) == []
