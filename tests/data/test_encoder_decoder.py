"""Batches of models whose encoder and decoder have sequences of their own lengths."""

from __future__ import annotations

import pytest
import torch

from accelerate_megatron.data.checks import BatchLimits, check_micro_batch
from accelerate_megatron.data.collate import (
    BatchShape,
    filler_batch,
    join_micro_batches,
    template_of,
)
from accelerate_megatron.errors import BatchError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.training.model_kinds import batch_limits, batch_rules
from tests.helpers.tiny_models import TinyModel

CONFIG = TinyModel("t5").config()
T5 = family_of(CONFIG, architectures=["T5ForConditionalGeneration"]).shape(CONFIG)
LIMITS = BatchLimits(vocab_size=99, **batch_limits(T5))


def _batch(rows=2, encoder=3, decoder=2, **changes):
    batch = {
        "input_ids": torch.full((rows, encoder), 7),
        "attention_mask": torch.ones(rows, encoder, dtype=torch.int64),
        "labels": torch.full((rows, decoder), 8),
    }
    return {key: value for key, value in (batch | changes).items() if value is not None}


def _join(*micro_batches, **changes):
    shape = {"num_micro_batches": 2, "micro_batch_size": 2, **batch_rules(T5)}
    return join_micro_batches(micro_batches, BatchShape(**(shape | changes)))


def test_each_side_is_padded_to_its_own_longest():
    # In the second micro-batch, labels happen to be as long as the input.
    joined = _join(_batch(encoder=5, decoder=2), _batch(encoder=4, decoder=4))

    assert joined.values["input_ids"].shape == (4, 5)
    assert joined.values["labels"].shape == (4, 4)
    assert joined.values["labels"][0].tolist() == [8, 8, -100, -100]
    assert joined.values["attention_mask"][2].tolist() == [1, 1, 1, 1, 0]
    assert (joined.longest, joined.longest_decoded) == (5, 4)


def test_each_side_is_cut_and_rounded_by_its_own_settings():
    cut = _join(_batch(encoder=9, decoder=9), seq_length=6, decoder_seq_length=4)
    rounded = _join(_batch(encoder=5, decoder=3), pad_to_multiple_of=2)

    assert [cut.values[key].shape[1] for key in ("input_ids", "labels")] == [6, 4]
    assert [rounded.values[key].shape[1] for key in ("input_ids", "labels")] == [6, 4]


def test_a_batch_without_a_mask_gets_one_of_what_was_there():
    joined = _join(_batch(encoder=3, attention_mask=None), _batch(encoder=2, attention_mask=None))

    assert joined.values["attention_mask"].tolist() == [[1, 1, 1]] * 2 + [[1, 1, 0]] * 2


def test_filler_rows_see_something_and_count_nothing():
    batch = _batch(
        rows=1,
        decoder_input_ids=torch.full((1, 2), 5),
        decoder_attention_mask=torch.ones(1, 2, dtype=torch.int64),
    )
    values = _join(batch).values
    filler = filler_batch(template_of(values))

    for of_batch in (values, filler):
        assert (of_batch["labels"][1:] == -100).all()
        assert of_batch["attention_mask"][1:].all()
        assert of_batch["decoder_attention_mask"][1:].all()


def test_decoder_keys_that_fit_are_let_through():
    batch = _batch(
        decoder_input_ids=torch.zeros(2, 2, dtype=torch.int64),
        decoder_attention_mask=torch.tensor([[True, False], [True, True]]),
    )

    assert check_micro_batch(batch, LIMITS) is batch


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": None}, r"no labels; it has .*labels are the tokens that the decoder"),
        ({"labels": torch.full((2, 2), 99)}, r"labels holds 99, .*0 to 98 \(or -100"),
        (
            {"labels": torch.full((3, 2), 1)},
            r"labels has the shape \[3, 2\] and input_ids \[2, 3\]",
        ),
        ({"labels": torch.full((2,), 1)}, r"labels has the shape \[2\]"),
        ({"decoder_input_ids": torch.full((2, 2), -100)}, r"decoder_input_ids holds -100"),
        ({"decoder_input_ids": torch.full((2, 3), 1)}, r"\[2, 3\] and labels \[2, 2\]"),
        ({"decoder_attention_mask": torch.full((2, 2), 2)}, r"decoder_attention_mask holds the va"),
        ({"attention_mask": torch.ones(2, 2).long()}, r"attention_mask has the shape \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(BatchError, match=words):
        check_micro_batch(_batch(**changes), LIMITS)


def test_decoder_inputs_are_asked_for_by_name_where_none_can_be_made():
    required = ("input_ids", "labels", "decoder_input_ids")
    limits = BatchLimits(required_keys=required, **batch_limits(T5))

    with pytest.raises(BatchError, match=r"no decoder_input_ids; .*decoder_start_token_id"):
        check_micro_batch(_batch(), limits)
