"""Megatron-Core's masked datasets, BERT's and T5's, over files that were checked.

As in `datasets.py`, Megatron decides about samples and masks, and what is replaced is how its
indices are kept: it writes them on global rank 0 while the others read them, and unpickles them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)

from accelerate_megatron.config.indexed_data import IndexedData
from accelerate_megatron.config.masked_data import Vocabulary
from accelerate_megatron.engine.datasets import (
    CheckedFiles,
    LocalBuilder,
    blend_settings,
    cache_folder,
    checked_indices,
    parts_of_splits,
    without_cache_warnings,
)
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.indexed.cache import cached
from accelerate_megatron.indexed.index import IDX, Index, with_suffix

_LONGEST_SENTENCE = 512
"""Megatron leaves out documents of several sequences with a longer one: helpers.cpp, 0.16.1."""

_ALL_EPOCHS = int(np.iinfo(np.int32).max) - 1


@dataclass(frozen=True)
class _Tokenizer:
    """What Megatron asks its tokenizer. It has no `pad`: Megatron then marks padding with -1."""

    cls: int | None
    sep: int | None
    mask: int | None
    bos: int
    eos: int | None
    inv_vocab: dict[int, str]
    additional_special_tokens_ids: list[int]

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Nothing: no index depends on it."""
        return {}


@dataclass
class CheckedBertConfig(CheckedFiles, BERTMaskedWordPieceDatasetConfig):  # type: ignore[misc]  # megatron is untyped
    """Megatron's settings for masked language models."""


@dataclass
class CheckedT5Config(CheckedFiles, T5MaskedWordPieceDatasetConfig):  # type: ignore[misc]  # megatron is untyped
    """Megatron's settings for span corruption."""


class _Checked(MaskedWordPieceDataset):  # type: ignore[misc]  # megatron is untyped
    """Indices out of our cache, and errors that say what to do."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedDataset:
        """Open the files as the settings say."""
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)

    def _build_sample_index(self, sequence_length: int, min_sentences_per_sample: int) -> Any:
        from megatron.core.datasets import helpers

        key = {**self.unique_identifiers, "split": self.index_split.name}
        key["tokenizer"] = None  # no index depends on it
        key["checksum"] = self.config.checksums[self.dataset_path]
        key["lengths"] = [sequence_length, min_sentences_per_sample]
        bounds = np.append(self.indices, self.indices[-1] + 1)

        def build() -> dict[str, Any]:
            index = helpers.build_mapping(
                self.dataset.document_indices[bounds],
                self.dataset.sequence_lengths,
                1 if self.num_samples is None else _ALL_EPOCHS,
                np.iinfo(np.int64).max if self.num_samples is None else self.num_samples,
                sequence_length,
                self.config.short_sequence_probability,
                self.config.random_seed,
                False,
                min_sentences_per_sample,
            )
            return {"sample_index": index}

        folder = cache_folder(self.dataset_path, self.config.cache_folder)
        return cached(folder, key, build)["sample_index"]


class CheckedBertDataset(_Checked, BERTMaskedWordPieceDataset):  # type: ignore[misc]  # megatron is untyped
    """Megatron's samples for masked language models."""


class CheckedT5Dataset(_Checked, T5MaskedWordPieceDataset):  # type: ignore[misc]  # megatron is untyped
    """Megatron's samples for span corruption."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return a sample.

        Raises:
            ConfigurationError: It has more spans than the tokenizer has sentinel tokens, or longer
                targets than the decoder.
        """
        try:
            return super().__getitem__(idx)  # type: ignore[no-any-return]
        except (IndexError, AssertionError) as error:
            tokens = len(self.config.tokenizer.additional_special_tokens_ids)
            raise ConfigurationError(
                f"Sample {idx} of {self.dataset_path} has more masked spans than the tokenizer has "
                f"sentinel tokens ({tokens}), or its targets do not fit into decoder_seq_length="
                f"{self.config.sequence_length_decoder}. Set a larger decoder_seq_length, a "
                "smaller mask_prob, or a shorter seq_length."
            ) from error


def build_masked_datasets(data: IndexedData, vocabulary: Vocabulary) -> list[Any]:
    """Return the datasets of train, validation and test; None for a split without a share.

    Communicates with nobody. Element i of a dataset is a dict of Megatron's keys. BERT's: text,
    types, padding_mask, labels and loss_mask, [s] each, and is_random; T5's: text_enc and enc_mask
    [s], text_dec, dec_mask, labels and loss_mask [s of the decoder].

    Args:
        data: The settings; `data.masked` is set.
        vocabulary: That of the tokenizer which made the files.

    Raises:
        DataFileError: A file is damaged, or holds ids beyond the vocabulary.
        ConfigurationError: A split has a share, but no document that samples can be made of.
    """
    sizes = [len(vocabulary.words), data.vocab_size or len(vocabulary.words)]
    indices = checked_indices(data, vocab_size=min(sizes))
    config = _config(data, vocabulary, {prefix: i.checksum for prefix, i in indices.items()})
    _check_parts(data, indices, config)
    dataset = CheckedBertDataset if _masked(data).kind == "bert" else CheckedT5Dataset
    builder = LocalBuilder(dataset, list(data.sizes), lambda: True, config)
    with without_cache_warnings():
        return list(builder.build())


def _masked(data: IndexedData) -> Any:
    assert data.masked is not None, "causal samples are built by build_gpt_datasets"
    return data.masked


def _config(data: IndexedData, vocabulary: Vocabulary, checksums: dict[str, int]) -> Any:
    masked = _masked(data)
    of_kind: dict[str, Any]
    if masked.kind == "bert":
        make: Any = CheckedBertConfig
        of_kind = {
            "classification_head": masked.two_sentences,
            "masking_max_ngram": 3,
            "masking_use_geometric_distribution": False,
        }
    else:
        make = CheckedT5Config
        of_kind = {
            "sequence_length_decoder": masked.decoder_seq_length,
            "masking_max_ngram": 10,
            "masking_use_geometric_distribution": True,
        }
    return make(
        random_seed=data.seed,
        sequence_length=data.seq_length,
        **blend_settings(data),
        mmap_bin_files=data.mmap_bin_files,
        # "" keeps Megatron from reading and writing files of its own.
        path_to_cache="",
        tokenizer=_Tokenizer(
            cls=vocabulary.cls,
            sep=vocabulary.sep,
            mask=vocabulary.mask,
            bos=vocabulary.pad,
            eos=vocabulary.eos,
            inv_vocab=dict(enumerate(vocabulary.words)),
            additional_special_tokens_ids=list(vocabulary.sentinels),
        ),
        masking_probability=masked.mask_prob,
        short_sequence_probability=masked.short_seq_prob,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        cache_folder=data.cache,
        checksums=checksums,
        **of_kind,
    )


def _check_parts(data: IndexedData, indices: dict[str, Index], config: Any) -> None:
    """Refuse a split with a share but no document to use: Megatron would look for one for ever."""
    problems = []
    least = _masked(data).min_sentences
    sizes = {prefix: index.num_documents for prefix, index in indices.items()}
    for name, prefix, first, last in parts_of_splits(data, config, sizes):
        if not _usable_documents(indices[prefix], first, last, least):
            problems.append(
                f"{with_suffix(prefix, IDX)}: the {name} split gets {last - first} of "
                f"{sizes[prefix]} documents, none of which has {least} sequence(s) or "
                f"more of {_LONGEST_SENTENCE} tokens at most. Build documents of sentences, "
                "as lists of texts in JSON lines; or give the split more of them, or none (0)."
            )
    if problems:
        raise ConfigurationError.of(problems)


def _usable_documents(index: Index, first: int, last: int, least: int) -> int:
    """Return how many documents from `first` to `last` samples can be made of."""
    ends = index.document_ends[first : last + 1]
    too_long = np.concatenate([[0], np.cumsum(index.lengths > _LONGEST_SENTENCE)])
    counts, has_long = np.diff(ends), np.diff(too_long[ends]) > 0
    return int(((counts >= least) & ((counts == 1) | ~has_long)).sum())
