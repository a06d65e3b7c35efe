"""Several indexed datasets to one, and what one holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.indexed.building import write_dataset
from accelerate_megatron.indexed.index import BIN, IDX, Index, check_tokens, read_index, with_suffix


def merge(prefixes: Sequence[str], output: str, *, overwrite: bool = False) -> Index:
    """Write the documents of all datasets, in order, into one; return its checked index.

    Raises:
        ConfigurationError: Their dtypes differ, or the output is there already or among them.
        DataFileError: One of them is damaged.
    """
    indices = [read_index(prefix) for prefix in prefixes]
    dtypes = {index.dtype.name for index in indices}
    if len(dtypes) > 1:
        listed = ", ".join(f"{index.prefix} {index.dtype.name}" for index in indices)
        raise ConfigurationError(
            f"The datasets have token ids of different dtypes: {listed}. Build them with one "
            "tokenizer, or with tokenizers of which all have 65500 tokens or more, or all fewer."
        )
    target = with_suffix(output, IDX)
    if target.exists():
        if any(target.samefile(with_suffix(prefix, IDX)) for prefix in prefixes):
            raise ConfigurationError(f"{output} is one of the datasets; choose another output.")
        if not overwrite:
            raise ConfigurationError(
                f"{target} is there already. Choose another output, or pass --overwrite."
            )
    write_dataset(
        output,
        [with_suffix(index.prefix, BIN) for index in indices],
        np.concatenate([index.lengths for index in indices]),
        np.concatenate([np.diff(index.document_ends) for index in indices]),
        indices[0].dtype,
    )
    return read_index(output)


@dataclass(frozen=True)
class Contents:
    """What `inspect` shows of a dataset."""

    index: Index
    smallest_id: int
    largest_id: int
    histogram: list[tuple[int, int, int]]
    """(shortest, longest, documents) of each bin."""


def inspect(prefix: str, *, vocab_size: int | None = None) -> Contents:
    """Check a dataset completely, every token id included, and count what is in it.

    Raises:
        DataFileError: It is damaged, or has ids beyond `vocab_size`.
    """
    index = read_index(prefix)
    smallest, largest = check_tokens(index, vocab_size)
    return Contents(index, smallest, largest, _histogram(index.document_lengths()))


def sample_documents(index: Index, number: int) -> list[tuple[int, list[int]]]:
    """Return (document, its token ids) of some documents, the same at each call, in order."""
    chosen = np.random.default_rng(0).permutation(index.num_documents)[:number]
    tokens, lengths = index.tokens(), index.document_lengths()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return [(int(n), tokens[starts[n] : starts[n + 1]].tolist()) for n in sorted(chosen)]


def _histogram(lengths: np.ndarray[Any, Any]) -> list[tuple[int, int, int]]:
    """Count documents in bins whose bounds double."""
    if not len(lengths):
        return []
    rows: list[tuple[int, int, int]] = []
    low, high = 0, 0
    while low <= lengths.max():
        count = int(((lengths >= low) & (lengths <= high)).sum())
        if count or rows:
            rows.append((low, high, count))
        low, high = high + 1, max(2 * high + 1, 1)
    return rows
