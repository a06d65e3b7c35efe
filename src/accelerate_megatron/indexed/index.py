"""The .idx file: how long each sequence of a .bin file is, and which sequences are a document.

Layout, little-endian: magic (9 bytes), version (u64, 1), dtype code (u8), number of sequences n
(u64), number of document ends d (u64), lengths (i32 [n]), pointers (i64 [n], bytes), document
ends (i64 [d], sequence numbers, the first is 0), and in multimodal files modes (i8 [n]).

Megatron-Core's reader trusts every number. Here each one is checked against the others and the
sizes of the files before an array is handed on.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from accelerate_megatron.errors import DataFileError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_OLDER_MAGIC = b"TNTIDX\x00\x00"

DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""Code -> dtype of the token ids. Codes 6 and 7 are floats, which no token id is."""

_FLOAT_CODES = (6, 7)
_SMALL_VOCABULARY = 65500
_SCANNED_AT_ONCE = 1 << 24
IDX, BIN = ".idx", ".bin"


def with_suffix(prefix: str | os.PathLike[str], suffix: str) -> Path:
    """Return the file of a prefix: the suffix is added, also to a name that has a dot."""
    return Path(f"{os.fspath(prefix)}{suffix}")


def dtype_for(vocab_size: int) -> type[np.integer[Any]]:
    """Return the dtype that Megatron's tools take for a vocabulary.

    Source: megatron-core 0.16.1, datasets/indexed_dataset.py, DType.optimal_dtype.
    """
    return np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32


@dataclass(frozen=True)
class Index:
    """The content of an .idx file that was checked, and of which .bin file it is."""

    prefix: str
    dtype: np.dtype[Any]
    lengths: np.ndarray[Any, Any]
    """Tokens of each sequence, int32 [n]."""
    document_ends: np.ndarray[Any, Any]
    """int64 [d]: document i is the sequences from entry i up to entry i + 1."""
    checksum: int
    """CRC-32 of the .idx file."""

    @property
    def num_documents(self) -> int:
        """Documents, those without a sequence included."""
        return len(self.document_ends) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def pointers(self) -> np.ndarray[Any, Any]:
        """Where each sequence begins in the .bin file, in bytes, int64 [n]."""
        return pointers_of(self.lengths, self.dtype)

    def tokens(self) -> np.ndarray[Any, Any]:
        """Return all token ids in order, mapped from the .bin file."""
        if not self.num_tokens:
            return np.zeros(0, dtype=self.dtype)
        return np.memmap(with_suffix(self.prefix, BIN), dtype=self.dtype, mode="r")

    def document_lengths(self) -> np.ndarray[Any, Any]:
        """Return the number of tokens of each document, int64."""
        sums = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        ends: np.ndarray[Any, Any] = sums[self.document_ends]
        return np.diff(ends)


def pointers_of(lengths: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Return the byte offset of each sequence, int64."""
    sums = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    return np.concatenate([np.zeros(1, np.int64), sums])[: len(lengths)]


def write_index(
    file: IO[bytes],
    lengths: np.ndarray[Any, Any],
    document_ends: np.ndarray[Any, Any],
    dtype: Any,
) -> None:
    """Write an .idx file, byte for byte as Megatron-Core's own writer does."""
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == np.dtype(dtype))
    file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(document_ends)))
    file.write(lengths.astype("<i4").tobytes())
    file.write(pointers_of(lengths, dtype).astype("<i8").tobytes())
    file.write(document_ends.astype("<i8").tobytes())


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """Read and check PREFIX.idx against PREFIX.bin.

    Raises:
        DataFileError: A file is missing, or a field of the index cannot be; the text names the
            file, the offset and the value.
    """
    path, data_path = with_suffix(prefix, IDX), with_suffix(prefix, BIN)
    for needed in (path, data_path):
        if not needed.is_file():
            raise DataFileError(
                f"{needed}: there is no such file. An indexed dataset is the two files "
                f"PREFIX{IDX} and PREFIX{BIN}; its path is the prefix, without them."
            )
    content = np.fromfile(path, dtype=np.uint8)
    dtype, num_sequences, num_ends = _read_header(path, content)
    parts, end = _split(path, content, num_sequences, num_ends)
    lengths, pointers, ends = parts
    if end not in (len(content), len(content) - num_sequences):
        raise _wrong(
            path, end, f"{len(content) - end} bytes follow the document ends", "none may follow"
        )
    _check_lengths(path, lengths)
    index = Index(os.fspath(prefix), dtype, lengths, ends, zlib.crc32(content.data))
    _check_pointers(path, pointers, index)
    _check_ends(path, ends, num_sequences, end)
    size, needed_size = data_path.stat().st_size, index.num_tokens * dtype.itemsize
    if size != needed_size:
        raise DataFileError(
            f"{data_path}: the file has {size} bytes, but {path.name} lists {index.num_tokens} "
            f"tokens of {dtype.name}, which take {needed_size}. Build both files again; one was "
            "cut off or belongs to another dataset."
        )
    return index


def _read_header(path: Path, content: np.ndarray[Any, Any]) -> tuple[np.dtype[Any], int, int]:
    raw = content[: _HEADER.size].tobytes()
    if raw.startswith(_OLDER_MAGIC):
        raise DataFileError(
            f"{path}: an index of the older cached or lazy format. Only the memory-mapped one is "
            "read: build the dataset again with accelerate-megatron data build."
        )
    if raw[: len(MAGIC)] != MAGIC:
        raise _wrong(path, 0, f"the first bytes are {raw[: len(MAGIC)]!r}", f"must be {MAGIC!r}")
    if len(raw) < _HEADER.size:
        raise _wrong(path, len(raw), "the file ends in its header", f"has {_HEADER.size} bytes")
    _, version, code, num_sequences, num_ends = _HEADER.unpack(raw)
    if version != VERSION:
        raise _wrong(path, 9, f"the version is {version}", f"only version {VERSION} is known")
    if code in _FLOAT_CODES:
        raise _wrong(path, 17, f"the dtype code is {code}, a float", "token ids are integers")
    if code not in DTYPES:
        raise _wrong(path, 17, f"the dtype code is {code}", f"one of {sorted(DTYPES)}")
    return np.dtype(DTYPES[code]).newbyteorder("<"), num_sequences, num_ends


def _split(
    path: Path, content: np.ndarray[Any, Any], num_sequences: int, num_ends: int
) -> tuple[list[np.ndarray[Any, Any]], int]:
    """Return the three arrays, and the offset of their end."""
    arrays: list[np.ndarray[Any, Any]] = []
    at = _HEADER.size
    for what, count, dtype in (
        ("lengths", num_sequences, "<i4"),
        ("pointers", num_sequences, "<i8"),
        ("document ends", num_ends, "<i8"),
    ):
        end = at + count * np.dtype(dtype).itemsize
        if end > len(content):
            raise _wrong(
                path, at, f"{count} {what} end at byte {end}", f"the file has {len(content)} bytes"
            )
        arrays.append(np.frombuffer(content, dtype, count, at))
        at = end
    return arrays, at


def _check_lengths(path: Path, lengths: np.ndarray[Any, Any]) -> None:
    if len(lengths) and lengths.min() < 0:
        first = int(np.argmax(lengths < 0))
        raise _wrong(
            path,
            _HEADER.size + 4 * first,
            f"sequence {first} has the length {lengths[first]}",
            "lengths are 0 or more",
        )


def _check_pointers(path: Path, pointers: np.ndarray[Any, Any], index: Index) -> None:
    expected = index.pointers
    if np.array_equal(pointers, expected):
        return
    first = int(np.argmax(pointers != expected))
    raise _wrong(
        path,
        _HEADER.size + 4 * len(pointers) + 8 * first,
        f"sequence {first} begins at byte {pointers[first]}",
        f"the {index.dtype.name} tokens before it end at byte {expected[first]}",
    )


def _check_ends(path: Path, ends: np.ndarray[Any, Any], num_sequences: int, end: int) -> None:
    start = end - 8 * len(ends)
    if not len(ends) or ends[0] != 0:
        found = ends[0] if len(ends) else "missing"
        raise _wrong(path, start, f"the first document end is {found}", "it is 0")
    if ends[-1] != num_sequences:
        raise _wrong(
            path, end - 8, f"the last document end is {ends[-1]}", f"there are {num_sequences}"
        )
    falling = np.diff(ends) < 0
    if falling.any():
        at = int(np.argmax(falling)) + 1
        raise _wrong(
            path,
            start + 8 * at,
            f"document end {at} is {ends[at]}, below the one before it, {ends[at - 1]}",
            "they never fall",
        )


def _wrong(path: Path, offset: int, what: str, rule: str) -> DataFileError:
    return DataFileError(
        f"{path}: at byte {offset}, {what}, but {rule}. The file is damaged or of another kind; "
        "build it again with accelerate-megatron data build."
    )


def check_tokens(index: Index, vocab_size: int | None) -> tuple[int, int]:
    """Read every token id once; return the smallest and the largest, (0, -1) without tokens.

    Raises:
        DataFileError: An id is negative, or not below `vocab_size` if that is given.
    """
    tokens = index.tokens()
    smallest, largest = 0, -1
    for start in range(0, len(tokens), _SCANNED_AT_ONCE):
        part = tokens[start : start + _SCANNED_AT_ONCE]
        low, high = int(part.min()), int(part.max())
        wrong = low if low < 0 else high
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            place = start + int(np.argmax(part == wrong))
            raise DataFileError(
                f"{with_suffix(index.prefix, BIN)}: at byte {place * index.dtype.itemsize}, the "
                f"token id is {wrong}, but {_allowed(vocab_size)}. The files were built with "
                "another tokenizer, or their dtype code is wrong."
            )
        smallest, largest = min(smallest, low) if start else low, max(largest, high)
    return smallest, largest


def _allowed(vocab_size: int | None) -> str:
    if vocab_size is None:
        return "ids are 0 or more"
    return f"the vocabulary has {vocab_size} tokens: ids run from 0 to {vocab_size - 1}"
