"""Several samples in one row, each of them as if it were alone.

A packed row numbers its samples in `seq_idx`, which hides them from each other, and counts
`position_ids` anew for each. No sample predicts the first token of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from accelerate_megatron.data.collate import IGNORED_LABEL
from accelerate_megatron.errors import BatchError

Sample = Mapping[str, Any]
Row = dict[str, torch.Tensor]


class PackedDataset(Dataset[Row]):
    """The samples of a dataset, packed into rows of one length.

    Which samples share a row is decided once, by their lengths alone: the longest first, each into
    the fullest row that has room (best fit, decreasing). Every sample is in exactly one row.
    """

    def __init__(self, samples: Sequence[Sample], seq_length: int) -> None:
        """Pack `samples`, reading each of them once for its length.

        Args:
            samples: Each has `input_ids` and, unless all tokens are to be learned, `labels` with
                -100 where a token is not, such as a prompt's.
            seq_length: Tokens of a row; rows are padded to it.

        Raises:
            BatchError: A sample is longer than a row, or has no token; the text names it.
        """
        self._samples = samples
        self.seq_length = seq_length
        lengths = [len(samples[number]["input_ids"]) for number in range(len(samples))]
        for number, length in enumerate(lengths):
            if not 0 < length <= seq_length:
                raise BatchError(
                    f"Sample {number} has {length} tokens, but a packed row has {seq_length}. "
                    "Cut samples with truncation and max_length in the tokenizer, leave empty ones "
                    "out, or pack into longer rows."
                )
        self.rows = best_fit(lengths, seq_length)
        """The numbers of the samples in each row."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return pack([self._samples[number] for number in self.rows[index]], self.seq_length)


def pack(samples: Sequence[Sample], seq_length: int) -> Row:
    """Return one row of all samples, each value int64 [seq_length].

    Raises:
        BatchError: They are longer than the row, or labels are not as long as their tokens.
    """
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "seq_idx": []}
    for number, sample in enumerate(samples):
        ids = list(map(int, sample["input_ids"]))
        labels = list(map(int, sample.get("labels", ids)))
        if len(labels) != len(ids):
            raise BatchError(
                f"A sample has {len(ids)} input_ids and {len(labels)} labels; there has to be one "
                "label for each token, -100 where it is not to be learned."
            )
        row["input_ids"] += ids
        row["labels"] += [IGNORED_LABEL, *labels[1:]]
        row["position_ids"] += range(len(ids))
        row["seq_idx"] += [number] * len(ids)
    missing = seq_length - len(row["input_ids"])
    if missing < 0:
        raise BatchError(f"The samples have {seq_length - missing} tokens; a row has {seq_length}.")
    padding = {"labels": IGNORED_LABEL, "seq_idx": len(samples)}
    return {key: torch.tensor([*row[key], *[padding.get(key, 0)] * missing]) for key in row}


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return groups of indices whose lengths add up to `room` or less, in order of first index.

    The longest is placed first, each in the group that it fills best.
    """
    groups: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    for index in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[index]
        left = next((left for left in range(length, room + 1) if by_room[left]), None)
        if left is None:
            groups.append([])
            group, left = len(groups) - 1, room
        else:
            group = by_room[left].pop()
        groups[group].append(index)
        by_room[left - length].append(group)
    return sorted((sorted(group) for group in groups), key=lambda group: group[0])
