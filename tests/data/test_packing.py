"""Packed rows: every sample once, numbered, counted anew, and blind to the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate_megatron.data.packing import PackedDataset, best_fit, pack
from accelerate_megatron.errors import BatchError


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_sample_is_in_one_group_that_has_room_for_it(lengths: list[int]) -> None:
    groups = best_fit(lengths, 20)

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in group) <= 20 for group in groups)
    # Two groups that are half empty would have been one.
    half_empty = [group for group in groups if sum(lengths[i] for i in group) <= 10]
    assert len(half_empty) <= 1


def test_a_row_numbers_its_samples_and_learns_no_first_token() -> None:
    samples = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": torch.tensor([8, 9])},
    ]

    row = pack(samples, 7)

    assert {key: value.tolist() for key, value in row.items()} == {
        "input_ids": [5, 6, 7, 8, 9, 0, 0],
        "labels": [-100, 6, 7, -100, 9, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 0],
        "seq_idx": [0, 0, 0, 1, 1, 2, 2],
    }


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"input_ids": [1]}, {"input_ids": [1] * 9}], "Sample 1 has 9 tokens"),
        ([{"input_ids": []}], "Sample 0 has 0 tokens"),
    ],
)
def test_samples_that_no_row_holds_are_named(samples: list[dict], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        PackedDataset(samples, 8)


def test_labels_of_another_length_are_refused() -> None:
    with pytest.raises(BatchError, match="2 input_ids and 1 labels"):
        pack([{"input_ids": [1, 2], "labels": [1]}], 8)
