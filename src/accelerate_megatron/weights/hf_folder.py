"""The files of a Hugging Face model folder, and how a new one takes the place of an old one."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from accelerate.utils import convert_file_size_to_int
from safetensors.torch import save_file

from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.models.megatron_shapes import TensorShape

INDEX_NAME = "model.safetensors.index.json"
_ROOM_BESIDE_WEIGHTS = 16 * 2**20
"""Bytes for config, tokenizer and index."""
_WEIGHTS_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_MODEL_FILE = re.compile(r"config\.json|.*\.safetensors(\.index\.json)?|pytorch_model.*\.bin")


def shard_size_bytes(max_shard_size: int | str) -> int:
    """Return `max_shard_size` ("5GB", "200MB", a number of bytes) in bytes.

    Raises:
        ConfigurationError: It is not a size, or not positive.
    """
    try:
        size = int(convert_file_size_to_int(max_shard_size))
    except ValueError as error:
        raise ConfigurationError(
            f"max_shard_size is {max_shard_size!r}; it must be a number of bytes or a number with "
            "a unit: KB, MB, GB, KiB, MiB or GiB."
        ) from error
    if size == 0:
        raise ConfigurationError(f"max_shard_size is {max_shard_size!r}; it must be positive.")
    return size


def split_into_files(
    tensors: Mapping[str, tuple[TensorShape, torch.dtype]], max_bytes: int
) -> dict[str, list[str]]:
    """Return which tensors go into which file: in order, each file as full as it can be.

    A tensor larger than `max_bytes` gets a file of its own.
    """
    files: list[list[str]] = []
    filled = 0
    for name, (shape, dtype) in tensors.items():
        size = prod(shape) * dtype.itemsize
        if not files or filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": names
        for number, names in enumerate(files, start=1)
    }


class ShardedWriter:
    """Writes tensors into files as they come, and keeps only those of unfinished files."""

    def __init__(self, directory: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Take the folder to write into, and the names of the tensors of each file."""
        self._directory = directory
        self._files = files
        self._file_of = {name: file for file, names in files.items() for name in names}
        self._pending: dict[str, dict[str, torch.Tensor]] = {file: {} for file in files}
        self._num_parameters = 0
        self._num_bytes = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take contiguous CPU tensors; write each file that is complete now, and free it."""
        for name, tensor in tensors.items():
            file = self._file_of[name]
            self._pending[file][name] = tensor
            self._num_parameters += tensor.numel()
            self._num_bytes += tensor.nbytes
            if len(self._pending[file]) == len(self._files[file]):
                # transformers reads the format from the metadata.
                save_file(self._pending.pop(file), self._directory / file, {"format": "pt"})

    def finish(self) -> None:
        """Write the index of several files, once all tensors were added."""
        if self._pending:
            raise RuntimeError(f"tensors of {', '.join(self._pending)} were never added")
        if len(self._files) == 1:
            return
        index = {
            "metadata": {
                "total_parameters": self._num_parameters,
                "total_size": self._num_bytes,
            },
            "weight_map": self._file_of,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._directory / INDEX_NAME).write_text(text, encoding="utf-8")


def folder_problem(directory: Path, *, overwrite: bool) -> str | None:
    """Say why a model cannot be saved to `directory`; None when it can. Writes nothing."""
    if directory.exists() and not directory.is_dir():
        return f"{directory} is a file; name a folder to save the model in."
    if overwrite or not directory.exists():
        return None
    model_files = sorted(f.name for f in directory.iterdir() if _MODEL_FILE.fullmatch(f.name))
    if not model_files:
        return None
    return (
        f"{directory} already holds a model ({', '.join(model_files[:3])}). Name another folder, "
        "or allow overwriting it."
    )


def room_problem(
    directory: Path, tensors: Mapping[str, tuple[TensorShape, torch.dtype]]
) -> str | None:
    """Say how much room `tensors` lack on the disk of `directory`; None when there is enough.

    Files of an older model stay until the new ones are complete, so they free nothing.
    """
    needed = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
    place = directory.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= needed + _ROOM_BESIDE_WEIGHTS:
        return None
    return (
        f"The weights take {needed / 1e9:.2f} GB and {directory} has {free / 1e9:.2f} GB free; "
        "make room, name another folder, or save in a smaller dtype. Nothing was written."
    )


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Give an empty folder next to `directory` to write in; put its files in place at the end.

    Until the end `directory` is untouched, and it stays so when the block raises. A new folder
    appears complete, with one rename. In an existing one file replaces file; weights of an older
    model are removed and anything else is left alone.
    """
    directory = directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.parent / f".{directory.name}.{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        yield staging
        if directory.exists():
            _replace_files(staging, directory)
        else:
            staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace_files(staging: Path, directory: Path) -> None:
    new = {path.relative_to(staging) for path in staging.rglob("*") if path.is_file()}
    for old in directory.iterdir():
        # transformers prefers model.safetensors to an index, so a stale one would be loaded.
        stale = _WEIGHTS_FILE.fullmatch(old.name) or old.name == INDEX_NAME
        if stale and Path(old.name) not in new:
            old.unlink()
    for name in sorted(new):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(directory / name)
