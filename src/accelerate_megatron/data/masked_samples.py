"""Masked samples of an indexed dataset, in the keys of a batch. No Megatron here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from accelerate_megatron.data.collate import IGNORED_LABEL
from accelerate_megatron.data.indexed_samples import Sample


class MaskedSamples(Dataset[Sample]):
    """A Megatron dataset whose samples have transformers' keys.

    Of BERT: input_ids, token_type_ids, attention_mask and labels, [s] each, and
    next_sentence_label, 1 where the second part does not follow the first. Of T5: input_ids and
    attention_mask of the encoder [s], and labels [s of the decoder].

    Attributes:
        draws_nothing: Samples draw no random number of the process: theirs follow from the seed.
    """

    draws_nothing = True

    def __init__(self, dataset: Any, length: int, *, pad: int, two_sentences: bool) -> None:
        """Wrap `dataset`.

        Args:
            dataset: Gives Megatron's keys; None on a rank that never fetches.
            length: Its samples.
            pad: The id of the padding token.
            two_sentences: Whether the model learns which part of a sample comes first.
        """
        self.dataset = dataset
        self._length = length
        self._pad = pad
        self._two_sentences = two_sentences

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        sample: Mapping[str, Any] = self.dataset[index]
        if "input_ids" in sample:  # of a user's own provider
            return {key: torch.as_tensor(value) for key, value in sample.items()}
        if "text_enc" in sample:
            return self._inputs(sample["text_enc"], sample["enc_mask"]) | _labels(sample)
        batch = self._inputs(sample["text"], sample["padding_mask"]) | _labels(sample)
        is_token = batch["attention_mask"]
        batch["token_type_ids"] = torch.as_tensor(sample["types"]) * is_token
        if self._two_sentences:
            batch["next_sentence_label"] = torch.tensor(sample["is_random"])
        return batch

    def _inputs(self, tokens: Any, mask: Any) -> Sample:
        # Megatron marks padding with what stands for it, -1, and writes id 0 there.
        is_token = (torch.as_tensor(mask) == 1).long()
        ids = torch.as_tensor(tokens).where(is_token == 1, torch.tensor(self._pad))
        return {"input_ids": ids, "attention_mask": is_token}


def _labels(sample: Mapping[str, Any]) -> Sample:
    counts = torch.as_tensor(sample["loss_mask"]) == 1
    labels = torch.as_tensor(sample["labels"])
    return {"labels": labels.masked_fill(~counts, IGNORED_LABEL)}
