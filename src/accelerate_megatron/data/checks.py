"""What a batch shows: keys, shapes, dtypes and values that the model cannot take.

Every check runs on the rank that fetches a batch, before the batch is padded; what is said about
rows and columns is therefore what the user's collate_fn made. How a verdict reaches the other
ranks is the loader's business.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from accelerate_megatron.data.collate import DECODER_KEYS, IGNORED_LABEL, MASKS, BatchShape
from accelerate_megatron.data.row_labels import RowLabels, check_row_labels
from accelerate_megatron.errors import BatchError

_LIKE_INPUT = (
    "labels",
    "shift_labels",
    "attention_mask",
    "position_ids",
    "seq_idx",
    "token_type_ids",
)
"""What has an entry for each token, unless the model says otherwise of the labels."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What the model takes. None leaves a limit out."""

    vocab_size: int | None = None
    """Token ids run from 0 to `vocab_size` - 1: the config's number, without any padding."""
    max_positions: int | None = None
    """The longest sequence; None for a model whose positions have no end."""
    required_keys: tuple[str, ...] = ("input_ids", "labels")
    has_decoder: bool = False
    """Whether the model has a decoder apart, which reads labels of a length of their own."""
    row_labels: RowLabels | None = None
    """What the labels of whole rows may be; None: labels are one for each token."""
    token_types: int | None = None
    """Token types run from 0 to `token_types` - 1."""
    labels_hint: str = (
        "for a causal model, labels are the input_ids, with -100 where a token is not to be learned"
    )
    """What to say of labels where a key is missing."""


def check_micro_batch(batch: object, limits: BatchLimits) -> Mapping[str, object]:
    """Return `batch`, which is then known to be one that the model can take.

    Raises:
        BatchError: It is no mapping, lacks a key, or a tensor in it has a shape, dtype or value
            that does not fit.
    """
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"The DataLoader gave a {type(batch).__name__}; a batch has to be a dictionary with "
            f"{' and '.join(limits.required_keys)}. Let the collate_fn return one, as "
            "transformers' DataCollatorForLanguageModeling does."
        )
    missing = [
        key for key in dict.fromkeys(("input_ids", *limits.required_keys)) if key not in batch
    ]
    if missing:
        raise BatchError(
            f"The batch has no {' and no '.join(missing)}; it has {_listed(batch)}. Let the "
            f"collate_fn add it: {limits.labels_hint}."
        )
    input_ids = _integers(batch, "input_ids")
    if input_ids.dim() != 2:
        raise BatchError(
            f"input_ids has the shape {list(input_ids.shape)}; it has to be [b, s], one row per "
            "sample. A DataLoader needs a collate_fn that joins samples into rows."
        )
    if input_ids.numel() == 0:
        raise BatchError(
            f"input_ids has the shape {list(input_ids.shape)}: there is no token in it. Leave "
            "empty samples out of the dataset."
        )
    _check_range(input_ids, "input_ids", limits.vocab_size)
    of_decoder = DECODER_KEYS if limits.has_decoder else ()
    of_rows = ("labels",) if limits.row_labels is not None else ()
    for key in of_decoder:
        if key in batch:
            _check_like_labels(batch, key, input_ids, limits)
    for key in _LIKE_INPUT:
        if key in batch and key not in (*of_decoder, *of_rows):
            _check_like_input(batch, key, input_ids, limits)
    _check_labels_of_rows(batch, len(input_ids), limits)
    return batch


def _check_labels_of_rows(batch: Mapping[str, object], rows: int, limits: BatchLimits) -> None:
    if limits.row_labels is not None and "labels" in batch:
        check_row_labels(batch["labels"], "labels", rows, limits.row_labels)
    if "next_sentence_label" in batch:
        order = RowLabels(num_labels=2, problem_type="single_label_classification")
        check_row_labels(batch["next_sentence_label"], "next_sentence_label", rows, order)


def check_rows(micro_batch: Mapping[str, object], shape: BatchShape) -> None:
    """Refuse more rows than a micro-batch has; `micro_batch` has passed `check_micro_batch`.

    Raises:
        BatchError: Naming both numbers.
    """
    input_ids = micro_batch["input_ids"]
    assert isinstance(input_ids, torch.Tensor)
    if len(input_ids) > shape.micro_batch_size:
        raise BatchError(
            f"The DataLoader gave {len(input_ids)} rows at once, but its batch size, which is the "
            f"micro-batch, is {shape.micro_batch_size}. A collate_fn that makes more rows than it "
            "is given samples needs a DataLoader with the larger batch_size."
        )


def check_length(longest: int, shape: BatchShape, limits: BatchLimits) -> None:
    """Refuse a batch that is longer than the model's positions once it is padded.

    Args:
        longest: The longest sequence before padding.
        shape: How the batch is padded.
        limits: What the model takes.

    Raises:
        BatchError: Naming the lengths, before and after padding, and the limit.
    """
    most = limits.max_positions
    length = shape.length_of(longest)
    if most is None or length <= most:
        return
    padded = ""
    if shape.seq_length is not None:
        padded = f" and is padded or cut to seq_length, {length}"
    elif length > longest:
        padded = f" and is padded to {length}, a multiple of {shape.pad_to_multiple_of}"
    raise BatchError(
        f"A sequence of the batch has {longest} tokens{padded}, but the model has {most} "
        f"positions. Cut the sequences to {most} tokens or fewer: with truncation and max_length "
        "in the tokenizer, or with the plugin's seq_length."
    )


def _check_like_input(
    batch: Mapping[str, object], key: str, input_ids: torch.Tensor, limits: BatchLimits
) -> None:
    """Check a tensor that has one entry for each token."""
    values = _integers(batch, key, also=torch.bool if key in MASKS else None)
    if values.shape != input_ids.shape:
        raise BatchError(
            f"{key} has the shape {list(values.shape)} and input_ids {list(input_ids.shape)}; "
            f"both have to be [b, s], one entry per token."
        )
    _check_values(key, values, limits)


def _check_like_labels(
    batch: Mapping[str, object], key: str, input_ids: torch.Tensor, limits: BatchLimits
) -> None:
    """Check a tensor that has one entry for each token of the decoder."""
    values = _integers(batch, key, also=torch.bool if key in MASKS else None)
    if values.dim() != 2 or values.shape[0] != input_ids.shape[0] or values.shape[1] == 0:
        raise BatchError(
            f"{key} has the shape {list(values.shape)} and input_ids {list(input_ids.shape)}; the "
            "decoder's has to be [b, t], with as many rows and a length of its own."
        )
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and values.shape != labels.shape:
        raise BatchError(
            f"{key} has the shape {list(values.shape)} and labels {list(labels.shape)}; both have "
            "one entry for each token of the decoder."
        )
    _check_values(key, values, limits)


def _check_values(key: str, values: torch.Tensor, limits: BatchLimits) -> None:
    if key in ("labels", "shift_labels"):
        _check_range(values[values != IGNORED_LABEL], key, limits.vocab_size)
    elif key == "decoder_input_ids":
        _check_range(values, key, limits.vocab_size)
    elif key == "token_type_ids":
        _check_token_types(values, limits.token_types)
    elif key == "position_ids":
        _check_positions(values, limits.max_positions)
    elif key in MASKS and ((values != 0) & (values != 1)).any():
        wrong = values[(values != 0) & (values != 1)][0].item()
        raise BatchError(
            f"{key} holds the value {wrong}; it has to be 1 where a token is to be seen "
            "and 0 where it is padding. Number packed samples in seq_idx, or let their "
            "position_ids begin anew and leave attention_mask out."
        )


def _integers(
    batch: Mapping[str, object], key: str, *, also: torch.dtype | None = None
) -> torch.Tensor:
    values = batch[key]
    if not isinstance(values, torch.Tensor):
        raise BatchError(
            f"{key} is a {type(values).__name__}; it has to be a torch tensor. Use "
            'return_tensors="pt", or convert it in the collate_fn.'
        )
    no_integer = values.is_floating_point() or values.is_complex() or values.dtype == torch.bool
    if no_integer and values.dtype != also:
        raise BatchError(
            f"{key} has the dtype {values.dtype}; it has to hold integers, as torch.long does."
        )
    return values


def _check_range(ids: torch.Tensor, key: str, vocab_size: int | None) -> None:
    if vocab_size is None or ids.numel() == 0:
        return
    smallest, largest = (int(value) for value in torch.aminmax(ids))
    if smallest >= 0 and largest < vocab_size:
        return
    wrong = smallest if smallest < 0 else largest
    allowed = f" (or {IGNORED_LABEL}, which does not count)" if "labels" in key else ""
    raise BatchError(
        f"{key} holds {wrong}, but the vocabulary has {vocab_size} tokens: ids run from 0 to "
        f"{vocab_size - 1}{allowed}. Use the model's own tokenizer, or call "
        "model.resize_token_embeddings(len(tokenizer)) before prepare."
    )


def _check_token_types(types: torch.Tensor, number: int | None) -> None:
    smallest, largest = (int(value) for value in torch.aminmax(types))
    if smallest < 0 or (number is not None and largest >= number):
        wrong = smallest if smallest < 0 else largest
        end = "" if number is None else f" to {number - 1}: the model's type_vocab_size is {number}"
        raise BatchError(f"token_type_ids holds {wrong}; token types run from 0{end}.")


def _check_positions(positions: torch.Tensor, most: int | None) -> None:
    smallest, largest = (int(value) for value in torch.aminmax(positions))
    if smallest < 0 or (most is not None and largest >= most):
        wrong = smallest if smallest < 0 else largest
        end = "" if most is None else f" to {most - 1}, the model has {most} of them"
        raise BatchError(
            f"position_ids holds {wrong}; positions run from 0{end}. Leave position_ids out of "
            "the batch to have every row counted from 0."
        )


def _listed(batch: Mapping[str, object]) -> str:
    return ", ".join(str(key) for key in batch) or "no keys at all"


_checked: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
"""id of a checked tensor -> the tensor itself, weakly, and its version then.

Tensors compare by value, so a WeakSet cannot hold them.
"""


def mark_checked(tensor: torch.Tensor) -> None:
    """Remember that `tensor` holds token ids that were checked, until it changes or is gone."""
    key = id(tensor)
    forget = weakref.ref(tensor, lambda _: _checked.pop(key, None))
    _checked[key] = (forget, _version_of(tensor))


def was_checked(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` came from one of our loaders and nobody has written to it since."""
    reference, version = _checked.get(id(tensor), (None, -1))
    return reference is not None and reference() is tensor and _version_of(tensor) == version


def _version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; one made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class RealPart:
    """Which part of a joined batch comes from the data; the rest is filler and padding."""

    num_rows: int
    """The first rows."""
    longest: int
    """Tokens of the longest sequence before padding."""


_real_parts: dict[int, tuple[weakref.ref[torch.Tensor], RealPart]] = {}
"""id of a tensor of token ids -> the tensor itself, weakly, and its real part."""


def mark_real_part(tensor: torch.Tensor, part: RealPart) -> None:
    """Remember which part of `tensor`, [rows, s], comes from the data, until it is gone."""
    key = id(tensor)
    _real_parts[key] = (weakref.ref(tensor, lambda _: _real_parts.pop(key, None)), part)


def real_part(tensor: torch.Tensor) -> RealPart:
    """Return the part of `tensor` that comes from the data: all of it where nothing was marked."""
    reference, part = _real_parts.get(id(tensor), (None, None))
    if part is None or reference is None or reference() is not tensor:
        return RealPart(*tensor.shape[:2])
    return part
