"""Samples of an indexed dataset in the keys of a batch, and the part of them one iteration takes.

No Megatron here: the dataset and the way to number its documents are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from accelerate_megatron.data.collate import IGNORED_LABEL

Sample = dict[str, torch.Tensor]


class IndexedSamples(Dataset[Sample]):
    """A Megatron dataset whose samples have transformers' keys, each [s].

    `shift_labels` stand at the token that predicts them, so that the last one predicts too;
    `labels` are the same at their own token. `position_ids` and `seq_idx` are there when they
    differ from those of one document.

    Attributes:
        draws_nothing: Samples draw no random number: some can be left out without being fetched.
    """

    draws_nothing = True

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        keeps_positions: bool = False,
        number_documents: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: Gives Megatron's keys; None on a rank that never fetches.
            length: Its samples.
            keeps_positions: Whether its positions begin anew at each document.
            number_documents: Returns the document of each token, where documents are to be
                hidden from each other; None: a row is one sequence.
        """
        self.dataset = dataset
        self._length = length
        self._keeps_positions = keeps_positions
        self._number_documents = number_documents

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        sample: Mapping[str, torch.Tensor] = self.dataset[index]
        if "input_ids" in sample:  # of a user's own provider
            return {key: torch.as_tensor(value) for key, value in sample.items()}
        tokens = torch.as_tensor(sample["tokens"])
        targets = torch.as_tensor(sample["labels"])
        shifted = targets.masked_fill(torch.as_tensor(sample["loss_mask"]) == 0, IGNORED_LABEL)
        batch = {
            "input_ids": tokens,
            "labels": torch.cat([tokens[:1], shifted[:-1]]),
            "shift_labels": shifted,
        }
        if self._keeps_positions:
            batch["position_ids"] = torch.as_tensor(sample["position_ids"])
        if self._number_documents is not None:
            batch["seq_idx"] = self._number_documents(tokens)
        elif self._keeps_positions:
            batch["seq_idx"] = torch.zeros_like(tokens)
        return batch


class Windows(Sampler[int]):
    """Gives samples in order: all of them, or the next window at each iteration.

    The datasets are shuffled by themselves. After the last whole window the first one follows.
    """

    def __init__(self, length: int, window: int | None) -> None:
        """Stand before the first window.

        Args:
            length: Samples to go through.
            window: Samples of one iteration; None: all.
        """
        super().__init__()
        self._length = length
        self._window = length if window is None else min(window, length)
        self._num_started = 0
        self.is_windowed = window is not None
        """Whether there is another window after each."""

    def __len__(self) -> int:
        return self._window

    def __iter__(self) -> Iterator[int]:
        num_windows = max(self._length // max(self._window, 1), 1)
        start = self._num_started % num_windows * self._window
        self._num_started += 1
        yield from range(start, start + self._window)

    def leave_out(self, num_windows: int) -> None:
        """Begin after `num_windows` more windows, used in an earlier run."""
        self._num_started += num_windows

    def state_dict(self) -> dict[str, int]:
        """Return how many iterations were started."""
        return {"num_started": self._num_started}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self._num_started = state["num_started"]
