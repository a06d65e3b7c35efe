"""Tiny encoders and their batches, for the oracle and the ranks alike; see `tiny_models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForPreTraining,
    MegatronBertForSequenceClassification,
    MegatronBertModel,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE = 99
MAX_POSITIONS = 64

ENCODERS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "bert": (BertConfig, BertForMaskedLM),
    "bert-pretraining": (BertConfig, BertForPreTraining),
    "bert-classifier": (BertConfig, BertForSequenceClassification),
    "bert-plain": (BertConfig, BertModel),
    "megatron-bert": (MegatronBertConfig, MegatronBertForMaskedLM),
    "megatron-bert-pretraining": (MegatronBertConfig, MegatronBertForPreTraining),
    "megatron-bert-classifier": (MegatronBertConfig, MegatronBertForSequenceClassification),
    "megatron-bert-plain": (MegatronBertConfig, MegatronBertModel),
}

Sample = dict[str, torch.Tensor]


def encoder_config(
    config_class: type[PreTrainedConfig], changes: dict[str, Any]
) -> PreTrainedConfig:
    """Return a config of 4 layers, hidden 64, 4 heads, vocabulary 99, without dropout."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.1,
        "pad_token_id": 0,
    }
    return config_class(**(fields | changes))


def encoder_samples(
    num_samples: int,
    labels: str = "tokens",
    *,
    num_labels: int = 3,
    min_length: int = 9,
    max_length: int = 24,
    seed: int = 7,
) -> list[Sample]:
    """Return samples of two segments, of different lengths.

    Args:
        num_samples: How many.
        labels: "tokens" (a third of them), "sentences" (tokens and the sentence order), "class",
            "number" or "several" (0.0 or 1.0 for each label).
        num_labels: Classes, or labels.
        min_length: Of the shortest.
        max_length: Of the longest.
        seed: Of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=generator)

    samples = []
    for _ in range(num_samples):
        length = min_length + int(draw(max_length - min_length + 1, 1))
        ids = 1 + draw(VOCAB_SIZE - 1, length)
        types = (torch.arange(length) >= length // 2).long()
        sample = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": types,
        }
        if labels in ("tokens", "sentences"):
            is_masked = draw(3, length) == 0
            sample["labels"] = ids.masked_fill(~is_masked, -100)
            sample["input_ids"] = ids.masked_fill(is_masked, 1)
        if labels == "sentences":
            sample["next_sentence_label"] = draw(2, 1)[0]
        if labels == "class":
            sample["labels"] = draw(num_labels, 1)[0]
        if labels == "number":
            sample["labels"] = torch.randn((), generator=generator)
        if labels == "several":
            sample["labels"] = draw(2, num_labels).float()
        samples.append(sample)
    return samples


def pad_encoder_samples(samples: Sequence[Sample]) -> Sample:
    """Return one right-padded batch of `encoder_samples`: a DataLoader's `collate_fn`."""
    batch = {}
    for key, first in samples[0].items():
        values = [sample[key] for sample in samples]
        if first.shape != samples[0]["input_ids"].shape:
            batch[key] = torch.stack(values)
            continue
        fill = -100 if key == "labels" else 0
        batch[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
    return batch
