"""Joins the micro-batches of one step into one batch, and makes batches of nothing.

A batch is [rows, s] with rows = num_micro_batches x micro-batch size, always: pipeline stages
agree on shapes before they know the data. Rows that the data cannot fill are *filler rows*, which
have no valid label and therefore no weight. What a batch may contain is checked in `checks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from accelerate_megatron.errors import BatchError, ConfigurationError

IGNORED_LABEL = -100
"""The label of a token that does not count, as everywhere in transformers."""

DECODER_KEYS = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""What an encoder-decoder model's batch has for its decoder, with a length of its own."""

MASKS = ("attention_mask", "decoder_attention_mask")

_PADDING = {
    "labels": IGNORED_LABEL,
    "shift_labels": IGNORED_LABEL,
    "next_sentence_label": IGNORED_LABEL,
}
"""What fills up a key; 0 for all others."""

_INDEX_KEYS = (
    "input_ids",
    "labels",
    "shift_labels",
    "position_ids",
    "seq_idx",
    "token_type_ids",
    "next_sentence_label",
    "decoder_input_ids",
)
"""Keys that torch wants as int64, whatever integers the DataLoader gives."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How large the batch of one step is on each data-parallel rank."""

    num_micro_batches: int
    micro_batch_size: int
    seq_length: int | None = None
    """Pad or cut every batch to this length; None takes each batch's longest sequence."""
    decoder_seq_length: int | None = None
    """The same for what the decoder reads, under `has_decoder`."""
    has_decoder: bool = False
    """Whether the model has an encoder and a decoder, each with sequences of its own length."""
    pad_to_multiple_of: int = 1
    """Sequence and context parallelism split a sequence into this many equal parts."""
    hides_padding: bool = False
    """Whether a batch without an attention mask gets one that hides what is padded here."""
    labels_are_per_row: bool = False
    """Whether `labels` are [rows] or [rows, n], not one for each token."""

    def __post_init__(self) -> None:
        if self.seq_length is not None and self.seq_length % self.pad_to_multiple_of:
            raise ConfigurationError(
                f"seq_length is {self.seq_length}, but sequence and context parallelism split a "
                f"sequence into {self.pad_to_multiple_of} equal parts. Set seq_length to a "
                f"multiple of {self.pad_to_multiple_of}, such as "
                f"{_round_up(self.seq_length, self.pad_to_multiple_of)}."
            )

    @property
    def rows(self) -> int:
        """Rows of a batch, filler rows included."""
        return self.num_micro_batches * self.micro_batch_size

    def length_of(self, longest: int) -> int:
        """Return s for a batch whose longest sequence has `longest` tokens."""
        return self.seq_length or _round_up(longest, self.pad_to_multiple_of)

    def decoder_length_of(self, longest: int) -> int:
        """Return the same for the decoder of a model that has one apart."""
        return self.decoder_seq_length or _round_up(longest, self.pad_to_multiple_of)


@dataclass(frozen=True, kw_only=True)
class JoinedBatch:
    """One step's batch and what it was made of."""

    values: dict[str, object]
    num_real_rows: int
    """The first rows, those that come from the data; the rest is filler."""
    longest: int
    """The longest sequence that the micro-batches had, before padding or cutting."""
    longest_decoded: int = 0
    """The same of what a decoder apart reads."""


def join_micro_batches(
    micro_batches: Sequence[Mapping[str, object]], shape: BatchShape
) -> JoinedBatch:
    """Join up to `num_micro_batches` micro-batches into one batch [rows, s].

    Sequences are padded on the right (labels with -100, everything else with 0) and cut to
    `seq_length` if that is given. A batch without an attention mask gets none: padding is on the
    right, where a causal model's earlier tokens do not see it, and its own labels do not count.
    With `shape.hides_padding` it gets one, since a token of an encoder sees to its right.
    Tensors [b] without a sequence dim are joined as they are; lists are joined to one list.

    Args:
        micro_batches: At least one; each with input_ids [b, s] (see `checks`), and together no
            more rows than `shape.rows`. Rows are what is joined: one piece with the rows of several
            micro-batches does as well.
        shape: The batch to make.

    Raises:
        BatchError: Keys differ between the micro-batches, or a value is a scalar or has another
            number of rows than the input_ids.
    """
    _check_same_keys(micro_batches)
    if shape.hides_padding:
        micro_batches = [_with_attention_mask(micro_batch) for micro_batch in micro_batches]
    sizes = [_rows_and_length(micro_batch) for micro_batch in micro_batches]
    values: dict[str, object] = {}
    for key in micro_batches[0]:
        pieces = [micro_batch[key] for micro_batch in micro_batches]
        if not any(isinstance(piece, torch.Tensor) for piece in pieces):
            values[key] = _join_lists(pieces)
            continue
        tensors = [
            _per_row(key, piece, rows) for piece, (rows, _) in zip(pieces, sizes, strict=True)
        ]
        joined = _join_tensors(key, tensors, sizes, shape)
        values[key] = torch.cat([joined, _filler_rows(key, shape.rows - len(joined), joined)])
    return JoinedBatch(
        values=values,
        num_real_rows=sum(rows for rows, _ in sizes),
        longest=max(length for _, length in sizes),
        longest_decoded=max(map(_decoder_length, micro_batches)) if shape.has_decoder else 0,
    )


BatchTemplate = dict[str, "tuple[tuple[int, ...], torch.dtype] | None"]
"""Shape and dtype of each tensor of a batch; None for a key that holds a list."""


def template_of(values: Mapping[str, object]) -> BatchTemplate:
    """Return the form of a batch without its content."""
    return {
        key: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        for key, value in values.items()
    }


def filler_batch(template: BatchTemplate) -> dict[str, object]:
    """Return a batch of the form of `template` in which no row counts."""
    values: dict[str, object] = {}
    for key, form in template.items():
        if form is None:
            values[key] = []
        else:
            rows, *rest = form[0]
            values[key] = _filler_rows(key, rows, torch.empty((0, *rest), dtype=form[1]))
    return values


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check_same_keys(micro_batches: Sequence[Mapping[str, object]]) -> None:
    first = set(micro_batches[0])
    for micro_batch in micro_batches[1:]:
        different = first.symmetric_difference(micro_batch)
        if different:
            raise BatchError(
                f"The micro-batches of one step have different keys: {', '.join(sorted(different))}"
                " is in some of them only. Let the collate_fn return the same keys every time."
            )


def _with_attention_mask(micro_batch: Mapping[str, object]) -> Mapping[str, object]:
    """Return a micro-batch with a mask, of ones where it had none: it shows all its tokens."""
    input_ids = micro_batch["input_ids"]
    assert isinstance(input_ids, torch.Tensor)
    if "attention_mask" in micro_batch:
        return micro_batch
    return {**micro_batch, "attention_mask": torch.ones_like(input_ids, dtype=torch.int64)}


def _rows_and_length(micro_batch: Mapping[str, object]) -> tuple[int, int]:
    input_ids = micro_batch["input_ids"]
    assert isinstance(input_ids, torch.Tensor)
    return input_ids.shape[0], input_ids.shape[1]


def _decoder_length(micro_batch: Mapping[str, object]) -> int:
    labels = micro_batch.get("labels", micro_batch.get("decoder_input_ids"))
    return labels.shape[1] if isinstance(labels, torch.Tensor) and labels.dim() > 1 else 0


def _per_row(key: str, piece: object, rows: int) -> torch.Tensor:
    """Return `piece`, which is then known to be a tensor with one entry per row."""
    if not isinstance(piece, torch.Tensor):
        raise BatchError(
            f"{key} is a tensor in some micro-batches of one step and not in others. Let the "
            "collate_fn return a tensor every time."
        )
    if piece.dim() == 0:
        raise BatchError(
            f"{key} is a scalar tensor ({piece.item()}); every tensor of a batch has one entry per "
            "row. Take it out of the batch in the collate_fn, or repeat it for each row."
        )
    if piece.shape[0] != rows:
        raise BatchError(
            f"{key} has the shape {list(piece.shape)}, but the micro-batch has {rows} rows: every "
            "tensor of a batch has one entry per row."
        )
    # Before any padding: -100 does not fit into every type of integer.
    return piece.long() if key in _INDEX_KEYS and not piece.is_floating_point() else piece


def _join_tensors(
    key: str, tensors: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]], shape: BatchShape
) -> torch.Tensor:
    """Join one key's tensors row by row, after giving them the same length.

    A tensor whose dim 1 is as long as the input_ids is a sequence, and gets the length of the
    batch; what a decoder apart reads gets the decoder's. Others with a dim 1 are padded to the
    longest among themselves.
    """
    has_columns = all(tensor.dim() >= 2 for tensor in tensors)
    if has_columns and not (key == "labels" and shape.labels_are_per_row):
        widths = [tensor.shape[1] for tensor in tensors]
        lengths = [length for _, length in sizes]
        if shape.has_decoder and key in DECODER_KEYS:
            target = shape.decoder_length_of(max(widths))
        else:
            target = shape.length_of(max(lengths)) if widths == lengths else max(widths)
        tensors = [_fit_length(key, tensor, target) for tensor in tensors]
    forms = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(forms) > 1:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
        raise BatchError(
            f"{key} has the shapes {shapes} in the micro-batches of one step; only the second dim "
            "can differ, where it is padded."
        )
    return torch.cat(list(tensors))


def _join_lists(pieces: Sequence[object]) -> list[object]:
    joined: list[object] = []
    for piece in pieces:
        joined.extend(piece if isinstance(piece, (list, tuple)) else [piece])
    return joined


def _fit_length(key: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Cut dim 1 of `tensor` to `length`, or pad it on the right."""
    tensor = tensor[:, :length]
    missing = length - tensor.shape[1]
    if missing == 0:
        return tensor
    shape = (tensor.shape[0], missing, *tensor.shape[2:])
    return torch.cat([tensor, tensor.new_full(shape, _PADDING.get(key, 0))], dim=1)


def _filler_rows(key: str, rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return `rows` rows that carry no weight.

    Their attention mask is all ones: a row that may look at nothing has a softmax over nothing,
    and its NaN would reach the gradients of every other row. Their labels are all -100, or NaN
    where labels are numbers, since any number can be one.
    """
    value: float = 1 if key in MASKS else _PADDING.get(key, 0)
    if key == "labels" and like.is_floating_point():
        value = float("nan")
    return like.new_full((rows, *like.shape[1:]), value)
