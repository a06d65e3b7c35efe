"""Labels of whole rows: what a classifier or a regression of sequences can take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerate_megatron.data.collate import IGNORED_LABEL
from accelerate_megatron.errors import BatchError
from accelerate_megatron.models.encoder import ProblemType


@dataclass(frozen=True, kw_only=True)
class RowLabels:
    """The outputs of the model, and the loss that its config asks for."""

    num_labels: int
    problem_type: ProblemType = None


def problem_type_of(rules: RowLabels, dtype: torch.dtype) -> str:
    """Return the kind of loss, as transformers chooses it.

    Source: transformers 5.24, models/bert/modeling_bert.py, BertForSequenceClassification.
    """
    if rules.problem_type is not None:
        return rules.problem_type
    if rules.num_labels == 1:
        return "regression"
    is_multi = dtype.is_floating_point
    return "multi_label_classification" if is_multi else "single_label_classification"


def check_row_labels(values: object, key: str, rows: int, rules: RowLabels) -> None:
    """Check the labels of `rows` rows.

    Raises:
        BatchError: They are no tensor, or have a shape, dtype or value that the loss cannot take.
    """
    if not isinstance(values, torch.Tensor):
        raise BatchError(
            f"{key} is a {type(values).__name__}; it has to be a torch tensor with one entry per "
            "row. Convert it in the collate_fn."
        )
    problem_type = problem_type_of(rules, values.dtype)
    _check_dtype(values, key, rules, problem_type)
    _check_shape(values, key, rows, rules, problem_type)
    if problem_type == "single_label_classification":
        _check_classes(values, key, rules.num_labels)
    elif not torch.isfinite(values).all():
        raise BatchError(f"{key} holds a number that is not finite; every row needs a real one.")
    elif problem_type == "multi_label_classification" and ((values < 0) | (values > 1)).any():
        wrong = values[(values < 0) | (values > 1)][0].item()
        raise BatchError(
            f"{key} holds {wrong}; the loss of several labels takes 1.0 for a label that holds "
            "and 0.0 for one that does not."
        )


def _check_dtype(values: torch.Tensor, key: str, rules: RowLabels, problem_type: str) -> None:
    wants_integers = problem_type == "single_label_classification"
    is_integer = not (
        values.is_floating_point() or values.is_complex() or values.dtype == torch.bool
    )
    if is_integer if wants_integers else values.is_floating_point():
        return
    wanted = "integers, as torch.long does" if wants_integers else "numbers, as torch.float does"
    named = f", problem_type {rules.problem_type!r}" if rules.problem_type else ""
    hint = (
        "For several classes set config.num_labels to their number."
        if rules.num_labels == 1 and not rules.problem_type
        else f"Convert the labels with .{'long' if wants_integers else 'float'}()."
    )
    raise BatchError(
        f"{key} has the dtype {values.dtype}, but the loss is {problem_type} (num_labels "
        f"{rules.num_labels}{named}): the labels have to hold {wanted}. {hint}"
    )


def _check_shape(
    values: torch.Tensor, key: str, rows: int, rules: RowLabels, problem_type: str
) -> None:
    number = rules.num_labels
    is_one = problem_type == "single_label_classification" or number == 1
    allowed = [[rows], [rows, 1]] if is_one else [[rows, number]]
    if list(values.shape) not in allowed:
        raise BatchError(
            f"{key} has the shape {list(values.shape)}, but the loss is {problem_type} with "
            f"num_labels {number}: labels of {rows} rows have to be "
            f"{' or '.join(str(shape) for shape in allowed)}."
        )


def _check_classes(values: torch.Tensor, key: str, number: int) -> None:
    counted = values[values != IGNORED_LABEL]
    if counted.numel() == 0:
        return
    smallest, largest = (int(value) for value in torch.aminmax(counted))
    if smallest < 0 or largest >= number:
        wrong = smallest if smallest < 0 else largest
        where = "config.num_labels" if key == "labels" else "the number of sentence orders"
        raise BatchError(
            f"{key} holds {wrong}, but {where} is {number}: classes run from 0 to {number - 1} "
            f"(or {IGNORED_LABEL}, which does not count)."
        )
