"""Documents to .bin/.idx files, in several processes, and again from where it was stopped.

Each part of the input becomes a file of its own in a folder next to the output; a part is whole or
not there. When all are there they are joined in order, the .bin file is put in its place and the
.idx file last: a reader that finds the index finds all of it.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from accelerate_megatron.errors import BuildStoppedError, ConfigurationError, DataFileError
from accelerate_megatron.indexed.documents import Document, Part, find_parts, read_documents
from accelerate_megatron.indexed.index import BIN, IDX, with_suffix, write_index
from accelerate_megatron.indexed.tokenizing import Encoder, Ids, TokenizerPlan

_STATE = "build.json"
_LOCK = "lock"
_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """What is built of what."""

    inputs: tuple[str, ...]
    output: str
    """Prefix of the files; each key's are OUTPUT_KEY_document.bin and .idx, as Megatron's."""
    tokenizer: TokenizerPlan
    keys: tuple[str, ...] = ("text",)
    workers: int = 1
    split: str | None = None

    def prefix_of(self, key: str) -> str:
        """Return the prefix of a key's two files."""
        return f"{self.output}_{key}_document"


@dataclass(frozen=True)
class BuildReport:
    """What was built, by key where keys differ."""

    prefixes: dict[str, str]
    documents: int
    empty: dict[str, int]
    """Documents of which no token was made; they are in the files as documents without any."""
    tokens: dict[str, int]
    seconds: float
    parts: int
    parts_found: int
    """Parts that an earlier build had finished."""


def build(
    plan: BuildPlan, *, overwrite: bool = False, on_part: Callable[[Part], None] | None = None
) -> BuildReport:
    """Build the files; go on where an earlier build of the same was stopped.

    Args:
        plan: What to build.
        overwrite: Whether files that are there may be replaced.
        on_part: Called with each part that is finished, also earlier.

    Raises:
        ConfigurationError: The output is there already, or another build left parts there, or is
            about to.
        DataFileError: A document is broken, or there is none.
        BuildStoppedError: One of the processes was killed.
    """
    start = time.perf_counter()
    _check_output(plan, overwrite)
    parts = find_parts(plan.inputs, split=plan.split)
    if not parts:
        raise DataFileError(f"{', '.join(plan.inputs)}: there is no document in it.")
    folder = with_suffix(plan.output, ".parts")
    folder.mkdir(exist_ok=True)
    with _alone_in(folder):
        _claim(folder, plan, parts)
        found = [n for n in range(len(parts)) if _finished(folder, n).exists()]
        missing = sorted(set(range(len(parts))) - set(found))
        for number in chain(found, _encode_parts(plan, parts, missing, folder)):
            if on_part is not None:
                on_part(parts[number])
        report = _join(plan, folder, len(parts))
        shutil.rmtree(folder)
    return BuildReport(**report, seconds=time.perf_counter() - start, parts_found=len(found))


def _check_output(plan: BuildPlan, overwrite: bool) -> None:
    if plan.workers < 1:
        raise ConfigurationError(f"--workers is {plan.workers}; it has to be 1 or more.")
    target = Path(plan.output).absolute().parent
    if not target.is_dir() or not os.access(target, os.W_OK):
        raise ConfigurationError(
            f"The output's folder {target} {'cannot be written' if target.is_dir() else 'is no'}"
            f"{' to' if target.is_dir() else ' folder'}. Make it first."
        )
    for key in plan.keys:
        path = with_suffix(plan.prefix_of(key), IDX)
        if path.exists() and not overwrite:
            raise ConfigurationError(
                f"{path} is there already. Choose another --output-prefix, or replace it with "
                "--overwrite."
            )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder of parts inside the block. The lock is the kernel's: it ends with us."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"Another build is writing to {folder} at this moment. Wait for it, or choose "
                "another --output-prefix."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _claim(folder: Path, plan: BuildPlan, parts: Sequence[Part]) -> None:
    """Make the folder of parts this build's, or go on in the one of a build that was the same."""
    settings = asdict(plan) | {"workers": None}
    settings["tokenizer"]["fast"] = zlib.crc32((plan.tokenizer.fast or "").encode())
    settings["changed"] = [
        os.stat(path).st_mtime_ns
        for path in dict.fromkeys(part.path for part in parts)
        if os.path.exists(path)
    ]
    settings["parts"] = [asdict(part) for part in parts]
    text = json.dumps(settings, sort_keys=True)
    state = folder / _STATE
    if not state.exists():
        _write_whole(state, text.encode())
    elif state.read_text(encoding="utf-8") != text:
        raise ConfigurationError(
            f"{folder} holds the parts of another build: its input, tokenizer or options were "
            "others. Delete the folder to begin anew, or repeat that build to finish it."
        )


def _encode_parts(
    plan: BuildPlan, parts: Sequence[Part], missing: Sequence[int], folder: Path
) -> Iterator[int]:
    """Encode the missing parts; yield each one's number when it is done."""
    jobs = [(number, parts[number]) for number in missing]
    if plan.workers == 1 or len(jobs) <= 1:
        _start_worker(plan, str(folder))
        yield from map(_encode_part, jobs)
        return
    executor = ProcessPoolExecutor(
        min(plan.workers, len(jobs)),
        # Not forked: this process has loaded transformers, and perhaps torch with its threads.
        multiprocessing.get_context("spawn"),
        _start_worker,
        (plan, str(folder)),
    )
    try:
        for done in as_completed([executor.submit(_encode_part, job) for job in jobs]):
            yield done.result()
    except BrokenProcessPool:
        raise BuildStoppedError(
            f"One of the {plan.workers} processes that encode was ended from outside, such as for "
            f"want of memory. What is finished stays in {folder}: repeat the command to go on, "
            "with fewer --workers if memory is short."
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


class _Worker:
    """What a process keeps between parts."""

    plan: BuildPlan
    folder: Path
    encoder: Encoder


def _start_worker(plan: BuildPlan, folder: str) -> None:
    # One thread for each process: --workers says how many cores are used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Worker.plan, _Worker.folder = plan, Path(folder)
    _Worker.encoder = Encoder(plan.tokenizer)


def _encode_part(job: tuple[int, Part]) -> int:
    number, part = job
    plan, encoder = _Worker.plan, _Worker.encoder
    lengths: dict[str, list[int]] = {key: [] for key in plan.keys}
    counts: dict[str, list[int]] = {key: [] for key in plan.keys}
    # By place: a key may hold what no file name can.
    paths = {
        key: _Worker.folder / f"{number:06d}.{place}.bin" for place, key in enumerate(plan.keys)
    }
    files = {key: path.open("wb") for key, path in paths.items()}
    try:
        for documents in _batches(read_documents(part, plan.keys)):
            for key in plan.keys:
                made = list(_encode(encoder, [document[key] for document in documents]))
                sequences = list(chain.from_iterable(made))
                counts[key] += map(len, made)
                lengths[key] += map(len, sequences)
                files[key].write(encoder.as_array(sequences).tobytes())
    finally:
        for file in files.values():
            file.close()
    arrays = {}
    for place, key in enumerate(plan.keys):
        arrays[f"lengths{place}"] = np.array(lengths[key], np.int32)
        arrays[f"counts{place}"] = np.array(counts[key], np.int64)
    unfinished = _finished(_Worker.folder, number).with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    unfinished.rename(_finished(_Worker.folder, number))
    return number


def _finished(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npz"


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield documents many at once, but not too much text."""
    while batch := list(islice(documents, 1)):
        size = _size(batch[0])
        while len(batch) < _AT_ONCE and size < _CHARACTERS_AT_ONCE:
            following = next(documents, None)
            if following is None:
                break
            batch.append(following)
            size += _size(following)
        yield batch


def _size(document: Document) -> int:
    return sum(
        len(text) if isinstance(text, str) else sum(map(len, text)) for text in document.values()
    )


def _encode(encoder: Encoder, texts: Sequence[str | list[str]]) -> Iterator[list[Ids]]:
    """Yield the sequences of each document, none of them empty, with the last token appended."""
    sentences = [[text] if isinstance(text, str) else text for text in texts]
    encoded = iter(encoder.encode([text for document in sentences for text in document]))
    for document in sentences:
        sequences = [ids for ids in islice(encoded, len(document)) if len(ids)]
        if sequences and encoder.plan.eod is not None:
            sequences[-1] = [*sequences[-1], encoder.plan.eod]
        yield sequences


def _join(plan: BuildPlan, folder: Path, num_parts: int) -> dict[str, Any]:
    """Join the parts into the files of each key; return the counts of a `BuildReport`."""
    found = [_read_arrays(_finished(folder, n)) for n in range(num_parts)]
    tokens, empty, documents = {}, {}, 0
    for place, key in enumerate(plan.keys):
        lengths = np.concatenate([arrays[f"lengths{place}"] for arrays in found])
        counts = np.concatenate([arrays[f"counts{place}"] for arrays in found])
        prefix = plan.prefix_of(key)
        pieces = [folder / f"{n:06d}.{place}.bin" for n in range(num_parts)]
        write_dataset(prefix, pieces, lengths, counts, plan.tokenizer.dtype)
        documents = len(counts)
        tokens[key] = int(lengths.sum(dtype=np.int64))
        empty[key] = int((counts == 0).sum())
    return {
        "prefixes": {key: plan.prefix_of(key) for key in plan.keys},
        "documents": documents,
        "empty": empty,
        "tokens": tokens,
        "parts": num_parts,
    }


def _read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(path, allow_pickle=False) as arrays:  # else its file would stay open
        return dict(arrays)


def write_dataset(
    prefix: str,
    pieces: Sequence[Path],
    lengths: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any],
    dtype: Any,
) -> None:
    """Write PREFIX.bin of the pieces in order, then PREFIX.idx; each appears whole.

    Args:
        prefix: Of the two files.
        pieces: Files of token ids.
        lengths: Tokens of each sequence.
        counts: Sequences of each document.
        dtype: Of the token ids.
    """
    idx, data = with_suffix(prefix, IDX), with_suffix(prefix, BIN)
    unfinished = data.with_name(f".{data.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as target:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        idx.unlink(missing_ok=True)  # no index may stand beside data that it does not describe
        unfinished.rename(data)
    finally:
        unfinished.unlink(missing_ok=True)
    unfinished_idx = idx.with_name(f".{idx.name}.{os.getpid()}")
    try:
        with unfinished_idx.open("wb") as file:
            write_index(file, lengths, np.concatenate([[0], np.cumsum(counts)]), dtype)
            file.flush()
            os.fsync(file.fileno())
        unfinished_idx.rename(idx)
    finally:
        unfinished_idx.unlink(missing_ok=True)


def _write_whole(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.rename(path)
