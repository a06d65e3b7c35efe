"""Where documents come from: text, JSON lines, Parquet and Hugging Face datasets, cut into parts.

A part is what one process reads at once: some bytes of a file, some rows of a table. Parts are
numbered, and their order is that of the input, whichever process reads which.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from accelerate_megatron.errors import DataFileError, UnsupportedError

PART_BYTES = 8 << 20
PART_ROWS = 20_000
LARGEST_DOCUMENT = 64 << 20
"""Bytes of one document: a process holds it, its text and its tokens in memory at once."""

Kind = Literal["text", "jsonl", "parquet", "dataset"]
Document = dict[str, "str | list[str]"]
_KIND_OF_SUFFIX: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Part:
    """Some documents: bytes from `start` to `end` of a file, or rows of a table.

    Lines belong to the part that their first byte is in.
    """

    kind: Kind
    path: str
    start: int
    end: int
    split: str | None = None
    """Of a Hugging Face dataset."""

    @property
    def size(self) -> int:
        """Bytes or rows."""
        return self.end - self.start


def find_parts(
    inputs: Sequence[str], *, split: str | None = None, part_bytes: int = PART_BYTES
) -> list[Part]:
    """Return the parts of files, folders of files and Hugging Face datasets, in order.

    Args:
        inputs: Paths; the files of a folder are taken in the order of their names.
        split: Of Hugging Face datasets.
        part_bytes: Largest part of a file of lines.

    Raises:
        DataFileError: An input does not exist, or has no documents in it.
        UnsupportedError: A kind of file that is not read.
        ImportError: A library for it is missing.
    """
    parts: list[Part] = []
    for given in inputs:
        path = Path(given)
        if _is_saved_dataset(path):
            parts += _dataset_parts(given, split)
        elif path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix in _KIND_OF_SUFFIX)
            if not files:
                raise DataFileError(
                    f"{given}: the folder has no file ending in {', '.join(_KIND_OF_SUFFIX)}."
                )
            for file in files:
                parts += _file_parts(file, part_bytes)
        elif path.is_file():
            parts += _file_parts(path, part_bytes)
        elif len(path.parts) <= 2 and not path.suffix and not given.startswith(("/", ".")):
            parts += _dataset_parts(given, split)
        else:
            raise DataFileError(f"{given}: there is no such file or folder.")
    return parts


def read_documents(part: Part, keys: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of `part`: for each of `keys` its text, or a list of sentences.

    Raises:
        DataFileError: A line is no UTF-8 or no JSON, or a key is missing or no text; the text
            names the line or the row.
    """
    if part.kind in ("text", "jsonl"):
        yield from _read_lines(part, keys)
    else:
        yield from _read_rows(part, keys)


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _file_parts(path: Path, part_bytes: int) -> list[Part]:
    kind = _KIND_OF_SUFFIX.get(path.suffix)
    if kind is None:
        raise UnsupportedError(
            f"{path}: files ending in {path.suffix or 'nothing'} are not read; "
            f"{', '.join(_KIND_OF_SUFFIX)} are. Unpack archives, and rename files of lines."
        )
    if kind == "parquet":
        rows = _library("pyarrow.parquet").ParquetFile(path).metadata.num_rows
        return _row_parts("parquet", str(path), rows)
    size = path.stat().st_size
    return [
        Part(kind, str(path), start, min(start + part_bytes, size))
        for start in range(0, size, part_bytes)
    ]


def _dataset_parts(given: str, split: str | None) -> list[Part]:
    return _row_parts("dataset", given, len(_load_dataset(given, split)), split)


def _row_parts(kind: Kind, path: str, rows: int, split: str | None = None) -> list[Part]:
    return [
        Part(kind, path, start, min(start + PART_ROWS, rows), split)
        for start in range(0, rows, PART_ROWS)
    ]


def _load_dataset(path: str, split: str | None) -> Any:
    datasets = _library("datasets")
    if _is_saved_dataset(Path(path)):
        found = datasets.load_from_disk(path)
        if hasattr(found, "keys"):
            if split not in found:
                raise DataFileError(
                    f"{path}: the dataset has the splits {', '.join(found)}; choose one of them "
                    "with --split."
                )
            found = found[split]
        return found
    return datasets.load_dataset(path, split=split or "train")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{package} is needed to read this input; install it with "
            "pip install 'accelerate-megatron[data]'."
        ) from error


def _read_lines(part: Part, keys: Sequence[str]) -> Iterator[Document]:
    with open(part.path, "rb") as file:
        at = part.start
        if at:
            # A line that begins before the part is another one's.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while at < part.end:
            line = file.readline(LARGEST_DOCUMENT + 1)
            if len(line) > LARGEST_DOCUMENT:
                raise DataFileError(
                    f"{_place(part, at)}: the line has more than {LARGEST_DOCUMENT >> 20} MiB, "
                    "which is the most that one document may have. Cut it into several."
                )
            if not line:
                return
            if line.strip():
                yield _document_of_line(part, at, line, keys)
            at += len(line)


def _document_of_line(part: Part, at: int, line: bytes, keys: Sequence[str]) -> Document:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataFileError(
            f"{_place(part, at)}: byte {at + error.start} of the file is no UTF-8 "
            f"({error.reason}). Convert the file to UTF-8, or take the line out."
        ) from error
    if part.kind == "text":
        return dict.fromkeys(keys, text.rstrip("\r\n"))
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataFileError(
            f"{_place(part, at)}: no JSON: {error.msg} at character {error.pos + 1}. Each line "
            "has to be one JSON object."
        ) from error
    if not isinstance(row, dict):
        raise DataFileError(
            f"{_place(part, at)}: a JSON {type(row).__name__}; each line has to be an object "
            'such as {"text": "..."}.'
        )
    return _document_of_row(lambda: _place(part, at), row, keys)


def _read_rows(part: Part, keys: Sequence[str]) -> Iterator[Document]:
    if part.kind == "dataset":
        table = _load_dataset(part.path, part.split)
        _check_columns(part, table.column_names, keys)
        table = table.select_columns(list(dict.fromkeys(keys)))
        rows: Iterator[Any] = (table[number] for number in range(part.start, part.end))
    else:
        rows = _parquet_rows(part, keys)
    for number, row in enumerate(rows, start=part.start):
        yield _document_of_row(partial("{}, row {}".format, part.path, number), row, keys)


def _parquet_rows(part: Part, keys: Sequence[str]) -> Iterator[Any]:
    file = _library("pyarrow.parquet").ParquetFile(part.path)
    _check_columns(part, file.schema_arrow.names, keys)
    at = 0
    for group in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if at < part.end and at + size > part.start:
            columns = list(dict.fromkeys(keys))
            for batch in file.iter_batches(1024, row_groups=[group], columns=columns):
                first, last = max(part.start - at, 0), min(part.end - at, batch.num_rows)
                if first < last:
                    yield from batch.slice(first, last - first).to_pylist()
                at += batch.num_rows
        else:
            at += size


def _check_columns(part: Part, names: Sequence[str], keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in names]
    if missing:
        raise DataFileError(
            f"{part.path}: there is no column {missing[0]!r}; there are {', '.join(names)}. "
            "Choose with --json-keys."
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    )


def _is_whole(text: str | list[str]) -> bool:
    """Return whether no character is half a surrogate pair, as JSON can spell and UTF-8 cannot."""
    try:
        (text if isinstance(text, str) else "".join(text)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _document_of_row(
    place: Callable[[], str], row: dict[str, Any], keys: Sequence[str]
) -> Document:
    for key in keys:
        if key not in row:
            raise DataFileError(
                f"{place()}: there is no {key!r}; there are {', '.join(map(repr, row))}. Choose "
                "with --json-keys."
            )
        if not _is_text(row[key]):
            raise DataFileError(
                f"{place()}: {key!r} is a {type(row[key]).__name__}; it has to be a text or a list "
                "of texts."
            )
        if not _is_whole(row[key]):
            raise DataFileError(
                f"{place()}: {key!r} holds half of a surrogate pair, which is no character. "
                "Replace it by U+FFFD, or take the line out."
            )
    return {key: row[key] for key in keys}


def _place(part: Part, at: int) -> str:
    """Return the file and line of byte `at`; counts the lines before it, for an error only."""
    number = 1
    with open(part.path, "rb") as file:
        while at > 0:
            piece = file.read(min(at, 1 << 20))
            number += piece.count(b"\n")
            at -= len(piece)
    return f"{os.fspath(part.path)}, line {number}"
