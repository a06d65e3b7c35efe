"""What a batch shows: each refusal names the value, the rule and the cure."""

from __future__ import annotations

import gc

import pytest
import torch

from accelerate_megatron.data.checks import (
    BatchLimits,
    check_length,
    check_micro_batch,
    check_rows,
    mark_checked,
    was_checked,
)
from accelerate_megatron.data.collate import BatchShape
from accelerate_megatron.errors import BatchError

LIMITS = BatchLimits(vocab_size=99, max_positions=8)


def _batch(**changes):
    ids = torch.tensor([[1, 2, 98], [0, 4, 5]])
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    return {key: value for key, value in (batch | changes).items() if value is not None}


def _with(tensor, value):
    changed = tensor.clone()
    changed[1, 1] = value
    return changed


IDS = torch.tensor([[1, 2, 98], [0, 4, 5]])

REFUSALS = {
    "no-mapping": ([IDS, IDS], r"gave a list; .*dictionary with input_ids and labels"),
    "no-labels": (_batch(labels=None), r"has no labels; it has input_ids, attention_mask\."),
    "no-ids": (_batch(input_ids=None), r"has no input_ids; it has labels"),
    "one-dim": (_batch(input_ids=IDS[0]), r"input_ids has the shape \[3\]; it has to be \[b, s\]"),
    "no-rows": (_batch(input_ids=IDS[:0]), r"shape \[0, 3\]: there is no token"),
    "no-columns": (_batch(input_ids=IDS[:, :0]), r"shape \[2, 0\]: there is no token"),
    "no-tensor": (_batch(input_ids=IDS.tolist()), r"input_ids is a list; .*return_tensors"),
    "float-ids": (_batch(input_ids=IDS.float()), r"input_ids has the dtype torch.float32"),
    "bool-labels": (_batch(labels=IDS.bool()), r"labels has the dtype torch.bool"),
    "id-too-large": (
        _batch(input_ids=_with(IDS, 99)),
        r"input_ids holds 99, but the vocabulary has 99 tokens: ids run from 0 to 98\.",
    ),
    "id-negative": (_batch(input_ids=_with(IDS, -1)), r"input_ids holds -1,"),
    "label-too-large": (
        _batch(labels=_with(IDS, 120)),
        r"labels holds 120, .*0 to 98 \(or -100, which does not count\)",
    ),
    "label-negative": (_batch(labels=_with(IDS, -1)), r"labels holds -1,"),
    "label-shape": (
        _batch(labels=IDS[:, :2]),
        r"labels has the shape \[2, 2\] and input_ids \[2, 3\]",
    ),
    "mask-shape": (
        _batch(attention_mask=torch.ones(2, 1, 3, 3).long()),
        r"attention_mask has the shape \[2, 1, 3, 3\]",
    ),
    "mask-value": (_batch(attention_mask=_with(IDS * 0, 2)), r"attention_mask holds the value 2;"),
    "mask-float": (_batch(attention_mask=torch.ones(2, 3)), r"attention_mask has the dtype"),
    "position": (
        _batch(position_ids=_with(IDS * 0, 8)),
        r"position_ids holds 8; positions run from 0 to 7, the model has 8",
    ),
}


@pytest.mark.parametrize(("batch", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_the_model_cannot_take_is_named(batch, message):
    with pytest.raises(BatchError, match=message):
        check_micro_batch(batch, LIMITS)


def test_a_good_batch_passes_with_ignored_labels_and_a_boolean_mask():
    batch = _batch(labels=_with(IDS, -100), attention_mask=torch.ones(2, 3).bool())

    assert check_micro_batch(batch, LIMITS) is batch


def test_labels_are_needed_only_where_they_are_required():
    limits = BatchLimits(vocab_size=99, required_keys=("input_ids",))

    check_micro_batch(_batch(labels=None), limits)


@pytest.mark.parametrize(
    ("longest", "changes", "message"),
    [
        (9, {}, r"has 9 tokens, but the model has 8 positions\. Cut the sequences to 8"),
        (7, {"pad_to_multiple_of": 3}, r"has 7 tokens and is padded to 9, a multiple of 3, but"),
        (7, {"seq_length": 16}, r"has 7 tokens and is padded or cut to seq_length, 16, but"),
    ],
    ids=["data", "multiple", "seq_length"],
)
def test_a_sequence_longer_than_the_positions_is_refused(longest, changes, message):
    shape = BatchShape(num_micro_batches=1, micro_batch_size=1, **changes)

    with pytest.raises(BatchError, match=message):
        check_length(longest, shape, LIMITS)


def test_a_long_sequence_is_fine_when_it_is_cut():
    shape = BatchShape(num_micro_batches=1, micro_batch_size=1, seq_length=8)

    check_length(100, shape, LIMITS)


def test_more_rows_than_a_micro_batch_are_refused():
    shape = BatchShape(num_micro_batches=4, micro_batch_size=1)

    with pytest.raises(BatchError, match=r"gave 2 rows at once.*micro-batch, is 1"):
        check_rows(_batch(), shape)


def test_a_checked_tensor_is_recognised_until_it_is_written_to():
    tensor, other = torch.zeros(2), torch.zeros(2)

    mark_checked(tensor)

    assert was_checked(tensor)
    assert not was_checked(other)
    tensor[0] = 1
    assert not was_checked(tensor)


def test_a_checked_tensor_that_is_gone_leaves_nothing_behind():
    from accelerate_megatron.data import checks

    tensor = torch.zeros(2)
    mark_checked(tensor)
    key = id(tensor)
    del tensor
    gc.collect()

    assert key not in checks._checked
