"""Joining micro-batches: padding, cutting, filler rows, and what cannot be joined."""

from __future__ import annotations

import pytest
import torch

from accelerate_megatron.data.collate import (
    BatchShape,
    filler_batch,
    join_micro_batches,
    template_of,
)
from accelerate_megatron.errors import BatchError, ConfigurationError


def _micro_batch(rows, length, *, value=1, **more):
    ids = torch.full((rows, length), value)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), **more}


def _shape(**changes):
    return BatchShape(**({"num_micro_batches": 2, "micro_batch_size": 2} | changes))


def test_unequal_lengths_are_padded_on_the_right_with_what_does_not_count():
    batch = join_micro_batches(
        [
            _micro_batch(1, 2, position_ids=torch.tensor([[5, 6]])),
            _micro_batch(1, 3, position_ids=torch.tensor([[5, 6, 7]])),
        ],
        _shape(micro_batch_size=1),
    )

    assert batch.values["input_ids"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.values["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.values["labels"].tolist() == [[1, 1, -100], [1, 1, 1]]
    assert batch.values["position_ids"].tolist() == [[5, 6, 0], [5, 6, 7]]
    assert (batch.num_real_rows, batch.longest) == (2, 3)


def test_a_short_batch_is_filled_with_rows_that_have_no_valid_label():
    batch = join_micro_batches([_micro_batch(2, 3), _micro_batch(1, 3)], _shape())

    assert batch.num_real_rows == 3
    assert batch.values["labels"][3].tolist() == [-100, -100, -100]
    assert batch.values["attention_mask"][3].tolist() == [1, 1, 1]
    assert batch.values["input_ids"][3].tolist() == [0, 0, 0]


def test_missing_micro_batches_are_filled_too():
    batch = join_micro_batches([_micro_batch(2, 3)], _shape(num_micro_batches=3))

    assert batch.values["input_ids"].shape == (6, 3)
    assert (batch.values["labels"][2:] == -100).all()


def test_rows_of_several_micro_batches_can_come_in_one_piece():
    batch = join_micro_batches([_micro_batch(3, 2)], _shape())

    assert batch.num_real_rows == 3
    assert batch.values["labels"].tolist() == [[1, 1]] * 3 + [[-100, -100]]


def test_length_is_rounded_up_to_a_multiple():
    batch = join_micro_batches([_micro_batch(2, 5)], _shape(pad_to_multiple_of=4))

    assert batch.values["labels"].shape == (4, 8)
    assert batch.longest == 5


@pytest.mark.parametrize(("length", "kept"), [(3, 3), (9, 6)], ids=["padded", "cut"])
def test_seq_length_is_the_length_of_every_batch(length, kept):
    batch = join_micro_batches([_micro_batch(2, length)], _shape(seq_length=6))

    assert batch.values["input_ids"].shape == (4, 6)
    assert (batch.values["labels"][0] != -100).sum() == kept
    assert batch.longest == length


def test_seq_length_that_does_not_divide_into_parts_is_refused():
    with pytest.raises(ConfigurationError, match=r"seq_length is 6.* 4 equal parts.*such as 8"):
        _shape(seq_length=6, pad_to_multiple_of=4)


def test_no_attention_mask_is_invented():
    micro_batch = _micro_batch(1, 2)
    del micro_batch["attention_mask"]

    batch = join_micro_batches([micro_batch], _shape())

    assert set(batch.values) == {"input_ids", "labels"}


def test_tensors_without_a_sequence_dim_are_joined_and_filled_with_zeros():
    first = _micro_batch(2, 3, weight=torch.tensor([1.0, 2.0]), flags=torch.ones(2, 4).bool())
    second = _micro_batch(1, 5, weight=torch.tensor([3.0]), flags=torch.ones(1, 4).bool())

    batch = join_micro_batches([first, second], _shape())

    assert batch.values["weight"].tolist() == [1.0, 2.0, 3.0, 0.0]
    assert batch.values["flags"].shape == (4, 4)
    assert batch.values["flags"].dtype == torch.bool


def test_values_that_are_no_tensors_become_one_list():
    batch = join_micro_batches(
        [
            _micro_batch(2, 3, text=["a", "b"], source="x"),
            _micro_batch(1, 3, text=["c"], source="y"),
        ],
        _shape(),
    )

    assert batch.values["text"] == ["a", "b", "c"]
    assert batch.values["source"] == ["x", "y"]


def test_small_integers_become_what_torch_indexes_with():
    micro_batch = {key: value.byte() for key, value in _micro_batch(1, 2).items()}

    batch = join_micro_batches([micro_batch], _shape(seq_length=3))

    assert batch.values["input_ids"].dtype == torch.int64
    assert batch.values["labels"][0].tolist() == [1, 1, -100]


def test_filler_batch_has_the_form_of_its_template_and_no_weight():
    template = template_of(
        join_micro_batches([_micro_batch(2, 3, text=["a", "b"])], _shape()).values
    )

    filler = filler_batch(template)

    assert {key: template.get(key) for key in filler} == template_of(filler)
    assert (filler["labels"] == -100).all()
    assert (filler["attention_mask"] == 1).all()
    assert filler["text"] == []


@pytest.mark.parametrize(
    ("micro_batches", "message"),
    [
        pytest.param(
            [_micro_batch(1, 2, scale=torch.tensor(0.5))],
            r"scale is a scalar tensor \(0.5\)",
            id="scalar",
        ),
        pytest.param(
            [_micro_batch(1, 2), _micro_batch(1, 2, extra=torch.ones(1))],
            r"different keys: extra is in some",
            id="keys",
        ),
        pytest.param(
            [_micro_batch(2, 2, weight=torch.ones(3))],
            r"weight has the shape \[3\].*2 rows",
            id="other-rows",
        ),
        pytest.param(
            [_micro_batch(1, 2, x=torch.ones(1)), _micro_batch(1, 2, x=[1])],
            r"x is a tensor in some micro-batches",
            id="mixed",
        ),
        pytest.param(
            [_micro_batch(1, 2, x=torch.ones(1, 2, 3)), _micro_batch(1, 2, x=torch.ones(1, 2, 4))],
            r"x has the shapes \[1, 2, 3\] and \[1, 2, 4\]",
            id="unequal-forms",
        ),
    ],
)
def test_what_cannot_be_joined_is_named(micro_batches, message):
    with pytest.raises(BatchError, match=message):
        join_micro_batches(micro_batches, _shape())
