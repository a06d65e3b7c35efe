"""Labels of whole rows: which loss they ask for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron.data.checks import BatchLimits, check_micro_batch
from accelerate_megatron.data.collate import (
    BatchShape,
    filler_batch,
    join_micro_batches,
    template_of,
)
from accelerate_megatron.data.row_labels import RowLabels, check_row_labels, problem_type_of
from accelerate_megatron.errors import BatchError

CLASSES = RowLabels(num_labels=3)
NUMBER = RowLabels(num_labels=1)


@pytest.mark.parametrize(
    ("rules", "dtype", "kind"),
    [
        (NUMBER, torch.float32, "regression"),
        (CLASSES, torch.int64, "single_label_classification"),
        (CLASSES, torch.float32, "multi_label_classification"),
        (RowLabels(num_labels=3, problem_type="regression"), torch.float32, "regression"),
    ],
)
def test_the_loss_is_the_one_that_transformers_chooses(
    rules: RowLabels, dtype: torch.dtype, kind: str
) -> None:
    assert problem_type_of(rules, dtype) == kind


@pytest.mark.parametrize(
    ("labels", "rules"),
    [
        pytest.param(torch.tensor([0, 2, -100]), CLASSES, id="classes"),
        pytest.param(torch.tensor([[0], [2], [1]]), CLASSES, id="classes-as-column"),
        pytest.param(torch.tensor([0.5, -100.0, 7.0]), NUMBER, id="numbers"),
        pytest.param(torch.ones(3, 3), CLASSES, id="several"),
    ],
)
def test_labels_that_fit_are_let_through(labels: torch.Tensor, rules: RowLabels) -> None:
    check_row_labels(labels, "labels", 3, rules)


@pytest.mark.parametrize(
    ("labels", "rules", "message"),
    [
        pytest.param([0, 1, 2], CLASSES, "labels is a list", id="list"),
        pytest.param(
            torch.tensor([0, 3, 1]), CLASSES, "holds 3, but config.num_labels is 3", id="too-large"
        ),
        pytest.param(torch.tensor([0, -1, 1]), CLASSES, "holds -1", id="negative"),
        pytest.param(
            torch.tensor([0, 1, 1]), NUMBER, "torch.int64, but the loss is regression", id="int"
        ),
        pytest.param(
            torch.tensor([0.0, 1.0, 1.0]), CLASSES, r"shape \[3\].*have to be \[3, 3\]", id="float"
        ),
        pytest.param(
            torch.ones(3, 3).long(),
            RowLabels(num_labels=3, problem_type="multi_label_classification"),
            r"int64.*Convert the labels with \.float\(\)",
            id="several-int",
        ),
        pytest.param(torch.ones(3, 3) * 2, CLASSES, "holds 2.0; the loss of several", id="two"),
        pytest.param(torch.tensor([1.0, torch.nan, 2]), NUMBER, "not finite", id="nan"),
        pytest.param(torch.tensor([1, 0]), CLASSES, r"shape \[2\].*labels of 3 rows", id="rows"),
    ],
)
def test_labels_that_the_loss_cannot_take_are_refused(
    labels: Any, rules: RowLabels, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_row_labels(labels, "labels", 3, rules)


IDS = torch.ones(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        pytest.param({"token_type_ids": IDS * 2}, "token_type_ids holds 2.* 0 to 1", id="type"),
        pytest.param(
            {"next_sentence_label": torch.tensor([0, 2])}, "next_sentence_label holds 2", id="order"
        ),
        pytest.param({}, "no labels.*labels are the ids of masked", id="missing"),
    ],
)
def test_an_encoders_batch_is_checked(extra: dict[str, torch.Tensor], message: str) -> None:
    limits = BatchLimits(vocab_size=9, token_types=2, labels_hint="labels are the ids of masked")
    batch = {"input_ids": IDS, **({"labels": IDS} if extra else {}), **extra}

    with pytest.raises(BatchError, match=message):
        check_micro_batch(batch, limits)


def test_what_an_encoder_is_padded_with_is_hidden() -> None:
    shape = BatchShape(
        num_micro_batches=2, micro_batch_size=1, pad_to_multiple_of=4, hides_padding=True
    )
    batches = [{"input_ids": torch.ones(1, length, dtype=torch.int64)} for length in (3, 5)]

    joined = join_micro_batches(batches, shape).values["attention_mask"]

    assert isinstance(joined, torch.Tensor)
    assert joined.tolist() == [[1] * 3 + [0] * 5, [1] * 5 + [0] * 3]


def test_as_many_labels_as_tokens_are_no_sequence() -> None:
    shape = BatchShape(
        num_micro_batches=1, micro_batch_size=2, pad_to_multiple_of=4, labels_are_per_row=True
    )
    batch = {"input_ids": IDS[:1], "labels": torch.ones(1, 5)}

    joined = join_micro_batches([batch], shape).values

    labels = joined["labels"]
    assert isinstance(labels, torch.Tensor)
    assert labels.shape == (2, 5)
    assert labels[0].tolist() == [1.0] * 5
    assert labels[1].isnan().all(), "the filler row counts"


def test_numbers_stay_numbers_and_fillers_have_none() -> None:
    filler = filler_batch(template_of({"input_ids": IDS, "labels": torch.ones(2)}))

    labels = filler["labels"]
    assert isinstance(labels, torch.Tensor)
    assert labels.isnan().all()
