"""Megatron-Core's GPT datasets over files that were checked, with a cache that is safe.

Its builders decide everything about samples, splits, epochs, shuffling and blends. Replaced is
what goes wrong around them: they wait for each other in barriers, in which a rank hangs when
another has failed; they keep their indices in files that may be half written and are unpickled;
they trust every number of an .idx file; and they loop for ever over a split without tokens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from accelerate_megatron.config.indexed_data import SPLITS, Blend, IndexedData
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.indexed.cache import cached
from accelerate_megatron.indexed.index import IDX, Index, check_tokens, read_index, with_suffix

_NO_EOD = -2  # not -1, which stands for padding
_WARNING_MODULES = ("gpt_dataset", "blended_dataset")
_INDICES = ("document_index", "sample_index", "shuffle_index")


@dataclass
class CheckedFiles:
    """What is known of the files of a dataset, besides Megatron's settings.

    Attributes:
        cache_folder: Where sample indices are kept; "" keeps none, None: next to each dataset.
        checksums: CRC-32 of each prefix's .idx file.
    """

    cache_folder: str | None = None
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass
class CheckedConfig(CheckedFiles, GPTDatasetConfig):  # type: ignore[misc]  # megatron is untyped
    """Megatron's settings of causal samples."""


class CheckedGPTDataset(GPTDataset):  # type: ignore[misc]  # megatron is untyped
    """Megatron's samples; their indices come from our cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The masks that Megatron keeps after the first sample are that sample's own: where it was
        # padded, the loss of every later one would be masked too.
        self.masks_and_position_ids_are_cacheable = False

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        key = {**self.unique_identifiers, "split": self.index_split.name}
        key["tokenizer"] = None  # no index depends on it
        key["drop_last"] = self.config.drop_last_partial_validation_sequence
        key["checksum"] = self.config.checksums[self.dataset_path]
        build = super()._build_document_sample_shuffle_indices
        arrays = cached(
            cache_folder(self.dataset_path, self.config.cache_folder),
            key,
            lambda: dict(zip(_INDICES, build(), strict=True)),
        )
        return tuple(arrays[name] for name in _INDICES)  # type: ignore[return-value]


class LocalBuilder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]  # megatron is untyped
    """Megatron's builder on one rank: it communicates with nobody."""

    @staticmethod
    def build_generic_dataset(
        cls: Callable[..., Any],  # the signature is Megatron's
        is_built_on_rank: Callable[[], bool],
        synchronize_ranks: bool,
        *args: Any,
    ) -> Any:
        """Return `cls(*args)`."""
        return cls(*args)

    def _build_megatron_datasets_parallel(
        self, prefixes: Sequence[str], split: Any, sizes_per_dataset: Sequence[Any]
    ) -> list[list[Any]]:
        built = [
            self._build_megatron_dataset_splits(prefix, split, sizes, False)
            for prefix, sizes in zip(prefixes, sizes_per_dataset, strict=True)
        ]
        return [list(of_split) for of_split in zip(*built, strict=True)]


@dataclass(frozen=True)
class _Tokens:
    """What Megatron asks its tokenizer: the token ids are in the files already."""

    eod: int
    vocab_size: int | None

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Nothing: no index depends on it."""
        return {}


def build_gpt_datasets(data: IndexedData) -> list[Any]:
    """Return the datasets of train, validation and test; None for a split without a share.

    Communicates with nobody. Element i of a dataset is a dict of Megatron's keys: tokens,
    labels (those of the next tokens), loss_mask, position_ids, each [s].

    Raises:
        DataFileError: A file is damaged, or holds ids beyond the vocabulary.
        ConfigurationError: A split has a share, but less data than one sequence.
    """
    indices = checked_indices(data, vocab_size=data.vocab_size)
    config = _config(data, {prefix: index.checksum for prefix, index in indices.items()})
    _check_parts(data, indices, config)
    builder = LocalBuilder(CheckedGPTDataset, list(data.sizes), lambda: True, config)
    with without_cache_warnings():
        return list(builder.build())


def cache_folder(prefix: str, folder: str | None) -> Path | None:
    """Return where the sample indices of a dataset are kept; None: nowhere."""
    if folder is None:
        return with_suffix(prefix, ".cache")
    return Path(folder) if folder else None


def checked_indices(data: IndexedData, *, vocab_size: int | None) -> dict[str, Index]:
    """Return the checked .idx file of each prefix that a split takes samples from.

    All token ids are read once; what was found is remembered next to the indices.

    Args:
        data: The settings.
        vocab_size: Ids from here on are refused; None: none are.

    Raises:
        DataFileError: A file is damaged, or holds ids beyond the vocabulary.
    """
    blends = [blend for blend in (data.blend, *data.blends) if blend is not None]
    prefixes = list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))
    indices = {prefix: read_index(prefix) for prefix in prefixes}
    for prefix, index in indices.items():
        _check_ids(index, vocab_size, cache_folder(prefix, data.cache))
    return indices


@contextmanager
def without_cache_warnings() -> Iterator[None]:
    """Keep Megatron from warning that nothing is cached: the cache is ours."""
    loggers = [logging.getLogger(f"megatron.core.datasets.{name}") for name in _WARNING_MODULES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def blend_settings(data: IndexedData) -> dict[str, Any]:
    """Return by Megatron's names what the splits are cut from, and how."""
    if data.blend is not None:
        return {"blend": _megatron_blend(data.blend), "split": data.split}
    blends = [blend and _megatron_blend(blend) for blend in data.blends]
    return {"blend_per_split": blends, "split": None}


def _config(data: IndexedData, checksums: dict[str, int]) -> CheckedConfig:
    return CheckedConfig(
        random_seed=data.seed,
        sequence_length=data.seq_length,
        **blend_settings(data),
        mmap_bin_files=data.mmap_bin_files,
        # "" keeps Megatron from reading and writing files of its own.
        path_to_cache="",
        tokenizer=_Tokens(_NO_EOD if data.eod_token is None else data.eod_token, data.vocab_size),
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
        cache_folder=data.cache,
        checksums=checksums,
    )


def _megatron_blend(blend: Blend) -> tuple[list[str], list[float] | None]:
    return list(blend.prefixes), None if blend.weights is None else list(blend.weights)


def _check_ids(index: Index, vocab_size: int | None, folder: Path | None) -> None:
    """Compare the largest token id with the vocabulary, reading all of them the first time."""
    facts = os.stat(with_suffix(index.prefix, ".bin"))
    key = {
        "class": "ids",
        "path": os.path.abspath(index.prefix),
        "checksum": index.checksum,
        "size": facts.st_size,
        "changed": facts.st_mtime_ns,
    }
    bounds = cached(folder, key, lambda: {"bounds": np.array(check_tokens(index, None))})
    largest = int(bounds["bounds"][1])
    if vocab_size is not None and largest >= vocab_size:
        check_tokens(index, vocab_size)  # says where


def _check_parts(data: IndexedData, indices: dict[str, Index], config: CheckedConfig) -> None:
    """Refuse a split with a share that has less than one sequence in any of its datasets."""
    problems = []
    sizes = {prefix: len(index.lengths) for prefix, index in indices.items()}
    for name, prefix, first, last in parts_of_splits(data, config, sizes):
        tokens = int(indices[prefix].lengths[first:last].sum(dtype=np.int64))
        if tokens < data.seq_length + 1:
            problems.append(
                f"{with_suffix(prefix, IDX)}: the {name} split gets {last - first} of "
                f"{sizes[prefix]} sequences with {tokens} tokens, but one sample has seq_length "
                f"+ 1 = {data.seq_length + 1}. {_way_out(name, data)}"
            )
    if problems:
        raise ConfigurationError.of(problems)


def parts_of_splits(
    data: IndexedData, config: Any, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, int, int]]:
    """Yield each split that has a share, a prefix of it, and from where to where it is taken.

    Args:
        data: The settings.
        config: The same in Megatron's terms.
        sizes: How much each prefix has of what is shared out: sequences, or documents.
    """
    for number, name in enumerate(SPLITS):
        blend = data.blend or data.blends[number]
        bounds = (0.0, 1.0) if data.blend is None else config.split_matrix[number]
        if blend is None or bounds is None:
            continue
        for prefix in blend.prefixes:
            # As Megatron rounds: megatron-core 0.16.1, BlendedMegatronDatasetBuilder.
            first, last = (round(bound * sizes[prefix]) for bound in bounds)
            yield name, prefix, first, last


def _way_out(name: str, data: IndexedData) -> str:
    if data.blend is None:
        return "Give it more data, or a smaller seq_length."
    return (
        f"split is {data.split!r}: give {name} a larger share or none (0), more data, or a smaller "
        "seq_length."
    )


def sequence_numbers(tokens: torch.Tensor, eod_token: int) -> torch.Tensor:
    """Return the number of the document in the sample that each token belongs to, int64 [s].

    An end-of-document token belongs to the document that it ends.
    """
    is_end = (tokens == eod_token).long()
    return is_end.cumsum(-1) - is_end
