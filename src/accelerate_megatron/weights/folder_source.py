"""Hugging Face weights read from a folder, slice by slice."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.weights.folder_files import canonical_names, check_index, weight_files

_MAPPED_BYTES = 64 * 2**20
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _TensorFile(Protocol):
    """One file of weights."""

    path: Path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of each tensor, "float32"."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return `tensor[index]`; an error means that the file could not be read."""


class _SafetensorsFile:
    """A safetensors file, mapped into memory only while its slices are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped_bytes = 0
        self._handle: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    view = file.get_slice(name)
                    self._shapes[name] = tuple(view.get_shape())
                    self._dtypes[name] = _FLOATS.get(view.get_dtype(), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{path} is not a whole safetensors file ({error}); it may be cut short or "
                "damaged. Copy or download it again."
            ) from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> dict[str, str]:
        return self._dtypes

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        if self._handle is None or self._mapped_bytes > _MAPPED_BYTES:
            # Pages read so far count as this process's memory until the file is unmapped.
            self._handle = None
            self._handle = safe_open(self.path, framework="pt")
            self._mapped_bytes = 0
        values: torch.Tensor = self._handle.get_slice(name)[index]
        self._mapped_bytes += self._bytes_touched(name, values)
        return values

    def _bytes_touched(self, name: str, values: torch.Tensor) -> int:
        """Return the bytes of the rows read: a cut along the columns touches whole rows."""
        return values.element_size() * values.shape[0] * _row_size(self._shapes[name])


def _row_size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape[1:]:
        size *= length
    return size


class _PickledFile:
    """A `.bin` file of torch, taken only if nothing but tensors is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # damaged bytes make an unpickler raise anything
            raise WeightsError(
                f"{path} is refused: a .bin file is a pickle, which can run code while it is "
                "loaded, and torch cannot load this one with weights_only=True "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Convert it to "
                "safetensors where it is trusted: load the model with transformers and call "
                "save_pretrained."
            ) from error
        is_weights = isinstance(found, dict) and all(
            isinstance(value, torch.Tensor) for value in found.values()
        )
        if not is_weights:
            raise WeightsError(
                f"{path} holds a {type(found).__name__}, not a dict of tensors; save the model's "
                "state_dict there, or use save_pretrained."
            )
        self._tensors: dict[str, torch.Tensor] = found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._tensors.items()}

    def dtypes(self) -> dict[str, str]:
        return {
            name: str(value.dtype).removeprefix("torch.") for name, value in self._tensors.items()
        }

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._tensors[name][index]


class FolderSource:
    """The weights in a folder that `save_pretrained` wrote, or one that looks like it.

    Opening it reads the headers only. Names are those of `expected`; see `canonical_names`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        expected: Collection[str],
        prefix: str,
        extras: Collection[str],
        tied: Mapping[str, str],
    ) -> None:
        """Open all files of the folder.

        Args:
            folder: The folder.
            expected: The names that the model has.
            prefix: What the names of the model without head lack.
            extras: Regular expressions of names that are no weights.
            tied: Names that may be there too, by the one that they have to be equal to: of a
                tied output layer.

        Raises:
            WeightsError: Files are missing, damaged, outside the folder or pickles that run
                code; tensors are in two files or not where the index says; values are integers.
        """
        self.label = str(folder)
        paths, weight_map = weight_files(folder)
        files = [_open(path) for path in paths]
        self._file_of: dict[str, _TensorFile] = {}
        for file in files:
            twice = self._file_of.keys() & file.shapes().keys()
            if twice:
                first = min(twice)
                raise WeightsError(
                    f"{folder} holds {first} in {self._file_of[first].path.name} and in "
                    f"{file.path.name}; remove the files of another model."
                )
            self._file_of.update(dict.fromkeys(file.shapes(), file))
        check_index(folder, weight_map, {n: f.path.name for n, f in self._file_of.items()})
        self._on_disk = canonical_names(self._file_of, expected, prefix, extras)
        self.copies = {
            copy: original
            for copy, original in tied.items()
            if copy in self._on_disk and original in self._on_disk
        }
        self._refuse_integers()

    def names(self) -> Collection[str]:
        """Return the names of all weights, a tied one once."""
        return self._on_disk.keys() - self.copies.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, as its file's header says."""
        on_disk = self._on_disk[name]
        return self._file_of[on_disk].shapes()[on_disk]

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return `tensor[index]`, read from its file."""
        on_disk = self._on_disk[name]
        file = self._file_of[on_disk]
        try:
            return file.read(on_disk, index)
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{file.path} could not be read ({error}); copy or download it again."
            ) from error

    def digest(self) -> str:
        """Return a digest of names, shapes and dtypes: of what the headers say."""
        digest = hashlib.blake2b(digest_size=8)
        for name, on_disk in sorted(self._on_disk.items()):
            dtype = self._file_of[on_disk].dtypes()[on_disk]
            digest.update(f"{name} {self.shape(name)} {dtype}".encode())
        return digest.hexdigest()

    def check_copies(self, *, rank: int = 0, num_ranks: int = 1) -> None:
        """Compare tensors that the model has once but the folder twice.

        Args:
            rank: Which part of the rows is compared here; the other ranks compare the others.
            num_ranks: How many parts.

        Raises:
            WeightsError: They differ, so they are not one parameter.
        """
        for copy, original in self.copies.items():
            rows = self.shape(original)[0]
            first, last = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
            step = max(1, _MAPPED_BYTES // 4 // max(1, _row_size(self.shape(original))))
            is_equal = self.shape(copy) == self.shape(original) and all(
                torch.equal(self.read(copy, block), self.read(original, block))
                for start in range(first, last, step)
                if (block := (slice(start, min(start + step, last)),))
            )
            if not is_equal:
                raise WeightsError(
                    f"{self.label} holds {copy} and {original} with different values, but the "
                    "config ties them. Set tie_word_embeddings to False in the config."
                )

    def _refuse_integers(self) -> None:
        wrong = [
            f"{name} ({dtype})"
            for name, on_disk in self._on_disk.items()
            if (dtype := self._file_of[on_disk].dtypes()[on_disk]) not in _FLOATS.values()
        ]
        if wrong:
            raise WeightsError(
                f"{len(wrong)} tensors of {self.label} are not floating point: "
                f"{', '.join(wrong)}. Save the model without quantisation."
            )


def _open(path: Path) -> _TensorFile:
    return _PickledFile(path) if path.suffix == ".bin" else _SafetensorsFile(path)
