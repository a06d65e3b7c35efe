"""Tiny indexed datasets, written without Megatron and without the code under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

EOD = 0


def documents(number: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Return documents of 3 to `longest` tokens of 1 to 98, each ended by `EOD`."""
    draw = np.random.default_rng(seed).integers
    return [[*draw(1, 99, draw(2, longest)).tolist(), EOD] for _ in range(number)]


def write_files(prefix: Path | str, docs: Sequence[Sequence[int]], dtype: str = "<u2") -> str:
    """Write PREFIX.bin and PREFIX.idx by the layout's description; return the prefix."""
    return write_sentences(prefix, [[doc] for doc in docs], dtype)


def write_sentences(
    prefix: Path | str, docs: Sequence[Sequence[Sequence[int]]], dtype: str = "<u2"
) -> str:
    """Write documents of several sequences each; return the prefix."""
    itemsize, code = np.dtype(dtype).itemsize, {"<u2": 8, "<i4": 4}[dtype]
    sentences = [sentence for doc in docs for sentence in doc]
    flat = [token for sentence in sentences for token in sentence]
    Path(f"{prefix}.bin").write_bytes(np.array(flat, dtype).tobytes())
    lengths = [len(sentence) for sentence in sentences]
    pointers = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    ends = [sum(len(doc) for doc in docs[:i]) for i in range(len(docs) + 1)]
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(ends))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(ends)}q", *ends)
    )
    return str(prefix)
