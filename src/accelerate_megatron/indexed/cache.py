"""Arrays kept on disk between runs: whole or invisible, and read without running anything.

An entry is a folder with a description and one .npy file for each array. It is written under
another name and then renamed, so that a reader never sees half of one, and of two jobs that make
the same entry one wins and the other uses it. What was damaged, or is described otherwise, is
built again. No file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from accelerate_megatron.log import get_logger

logger = get_logger(__name__)

FORMAT = 1
_DESCRIPTION = "description.json"
Arrays = dict[str, np.ndarray[Any, Any]]


def cached(
    folder: Path | None, key: Mapping[str, Any], build: Callable[[], Mapping[str, Any]]
) -> Arrays:
    """Return the arrays that `key` describes: those on disk, or else built ones, then kept.

    Where nothing can be written, the arrays are built for this process alone. Communicates with
    nobody; any number of processes may call it for one entry at the same time.

    Args:
        folder: Where entries are kept; None keeps none.
        key: All that the arrays depend on, in JSON values.
        build: Makes them.
    """
    if folder is None:
        return dict(build())
    text = json.dumps(dict(key) | {"format": FORMAT}, sort_keys=True, default=str)
    entry = folder / f"{zlib.crc32(text.encode()):08x}-{_slug(key)}"
    found = _read(entry, text)
    if found is not None:
        return found
    arrays = dict(build())
    try:
        _write(entry, text, arrays)
    except OSError as error:
        logger.info("Nothing is cached in %s: %s.", folder, error)
    return _read(entry, text) or arrays


def _slug(key: Mapping[str, Any]) -> str:
    return "-".join(str(key[name]) for name in ("class", "split") if name in key)


def _read(entry: Path, text: str) -> Arrays | None:
    """Return the arrays of `entry`; None unless it is whole and described by `text`."""
    try:
        kept = json.loads((entry / _DESCRIPTION).read_text(encoding="utf-8"))
        if kept["key"] != text:
            return None
        arrays: Arrays = {}
        for name, (shape, dtype, checksum) in kept["arrays"].items():
            array = np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            is_whole = list(array.shape) == shape and array.dtype.str == dtype
            if not is_whole or _checksum(array) != checksum:
                return None
            arrays[name] = array
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return arrays


def _checksum(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data) if array.size else 0


def _write(entry: Path, text: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    unfinished = entry.parent / f".{entry.name}-{uuid4().hex}"
    unfinished.mkdir()
    try:
        facts = {}
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array, allow_pickle=False)
            checksum = _checksum(array)
            facts[name] = [list(array.shape), array.dtype.str, checksum]
        description = json.dumps({"key": text, "arrays": facts})
        (unfinished / _DESCRIPTION).write_text(description, encoding="utf-8")
        _put(unfinished, entry, text)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put(unfinished: Path, entry: Path, text: str) -> None:
    """Give `unfinished` its name, unless another process has put a good entry there."""
    with contextlib.suppress(OSError):
        unfinished.rename(entry)
        return
    if _read(entry, text) is not None:
        return
    # Moved aside first: a folder that is not empty cannot be renamed over.
    aside = entry.parent / f".{entry.name}-{uuid4().hex}"
    with contextlib.suppress(OSError):
        os.rename(entry, aside)
    with contextlib.suppress(OSError):
        unfinished.rename(entry)
    shutil.rmtree(aside, ignore_errors=True)
