"""Reading files of a checkpoint so that nothing in them can run code.

Two kinds of file hold pickles: `.metadata`, torch's index of the tensors, and what `torch.save`
wrote. The first is read by an unpickler that knows a fixed list of names, the second by torch's
`weights_only`. Everything else of ours is JSON.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from accelerate_megatron.errors import CheckpointError, UnsafeCheckpointError

METADATA_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata."
_PLANNER = "torch.distributed.checkpoint.planner."

ALLOWED_NAMES = frozenset(
    {
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "pathlib.PurePosixPath",
        *(
            _METADATA + name
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        # Megatron-Core keeps the plan of each rank in the file.
        *(
            _PLANNER + name
            for name in (
                "BytesIOWriteData",
                "SavePlan",
                "TensorWriteData",
                "WriteItem",
                "WriteItemType",
            )
        ),
    }
)
"""All names that a `.metadata` may mention, besides torch's dtypes."""

_REFUSED_OPCODES = (
    # References to what is outside of the file, and older ways to make objects.
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX),
    # Reserve memory by a number in the file, before anything is read.
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)


class _BlockedError(Exception):
    """The file mentions what it must not."""


_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]


class _MetadataUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Unpickles what torch writes into `.metadata`, and refuses any other name.

    Python's own implementation and not the C one: that reserves as much memory as a damaged memo
    index says, and the kernel ends the process.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: action
        for code, action in _PythonUnpickler.dispatch.items()
        if bytes([code]) not in _REFUSED_OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if full not in ALLOWED_NAMES and not is_dtype:
            raise _BlockedError(full)
        return super().find_class(module, name)

    def load_build(self) -> None:
        # Setting attributes of a class, or a member of an enum, changes it for the whole process.
        target = self.stack[-2]
        kind = type(target)
        if isinstance(target, (type, Enum)) or f"{kind.__module__}.{kind.__qualname__}" not in (
            ALLOWED_NAMES
        ):
            raise _BlockedError(f"attributes of a {kind.__qualname__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(folder: Path, *, allow_pickle: bool = False) -> Metadata:
    """Return torch's index of the tensors in `folder`, checked against the files there.

    Args:
        folder: Holds `.metadata` and the files it names.
        allow_pickle: Unpickle it as torch does, which runs what it says.

    Raises:
        UnsafeCheckpointError: It mentions a name that has no place in it, or a file elsewhere.
        CheckpointError: It is missing or damaged.
    """
    path = folder / METADATA_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}. The checkpoint is incomplete.") from error
    unpickler: Any = pickle.Unpickler if allow_pickle else _MetadataUnpickler
    try:
        metadata: Metadata = unpickler(io.BytesIO(content)).load()
        _check_types(metadata)
        problem = _file_problem(metadata, folder)
    except _BlockedError as error:
        raise UnsafeCheckpointError(
            f"{path} mentions {error}, which an index of tensors has no use for: loading it could "
            "run code. Nothing of it was run. Load checkpoints only from people you trust; "
            "allow_pickle=True (--allow-pickle) loads it all the same."
        ) from None
    except Exception as error:  # damaged bytes make an unpickler raise anything
        raise CheckpointError(
            f"{path} is damaged and cannot be read ({type(error).__name__}: {error})."
        ) from error
    if problem:
        raise UnsafeCheckpointError(f"{path}: {problem}")
    return metadata


def _check_types(metadata: Metadata) -> None:
    """Raise TypeError unless the parts that are used later are what they have to be."""
    _expect(type(metadata) is Metadata, "the whole")
    _expect(type(metadata.state_dict_metadata) is dict, "the names")
    for name, entry in metadata.state_dict_metadata.items():
        _expect(type(name) is str, "a name")
        if type(entry) is BytesStorageMetadata:
            continue
        _expect(type(entry) is TensorStorageMetadata, "an entry")
        assert isinstance(entry, TensorStorageMetadata)
        _expect(type(entry.properties) is TensorProperties, "properties")
        _expect(isinstance(entry.properties.dtype, torch.dtype), "a dtype")
        _expect(_are_sizes(entry.size) and type(entry.chunks) is list, "a size")
        for chunk in entry.chunks:
            _expect(type(chunk) is ChunkStorageMetadata, "a chunk")
            _expect(_are_sizes(chunk.sizes) and _are_sizes(chunk.offsets), "a chunk's size")
    _expect(type(metadata.storage_data) is dict, "the places")
    for index, place in metadata.storage_data.items():
        _expect(type(index) is MetadataIndex and type(index.fqn) is str, "an index")
        _expect(type(place) is _StorageInfo and type(place.relative_path) is str, "a place")
        _expect(_are_sizes((place.offset, place.length)), "an offset")
    meta = getattr(metadata, "storage_meta", None)
    _expect(meta is None or type(meta) is StorageMeta, "storage_meta")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise TypeError(f"{what} of the index is of another type")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(v) is int and v >= 0 for v in values)


def _file_problem(metadata: Metadata, folder: Path) -> str:
    """Return what is wrong with the files that the index names."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
        if getattr(place, "transform_descriptors", None):
            return f"{place.relative_path} is compressed, which this version does not read."
    for name, end in ends.items():
        if name != Path(name).name or name in (".", ".."):
            return f"{name!r} is not the name of a file in the folder."
        path = folder / name
        if path.is_symlink():
            return f"{name} is a link, which may lead out of the folder."
        if not path.is_file():
            raise FileNotFoundError(f"{name} is missing")
        if path.stat().st_size < end:
            raise EOFError(f"{name} has {path.stat().st_size} bytes and should have {end}")
    return ""


def load_torch_file(
    path: Path, *, allow_pickle: bool = False, content: IO[bytes] | None = None
) -> Any:
    """Return what `torch.save` wrote to `path`, tensors on the CPU.

    Args:
        path: The file; with `content` its name for errors.
        allow_pickle: Unpickle it, which runs what it says.
        content: What to read instead of the file.

    Raises:
        UnsafeCheckpointError: It holds more than tensors and plain values.
        CheckpointError: It is missing or damaged.
    """
    try:
        return torch.load(content or path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise unsafe_object(path, error) from None
    except Exception as error:  # as above
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def unsafe_object(path: Path, error: BaseException) -> UnsafeCheckpointError:
    """Return the error for an object that `weights_only` refuses."""
    reason = str(error).split("\n\n")[0].splitlines()
    told = next((line.strip() for line in reason if "GLOBAL" in line or "class" in line), "")
    return UnsafeCheckpointError(
        f"{path} holds more than tensors and plain values, and loading it could run code "
        f"({told or 'weights_only refuses it'}). Nothing of it was run. allow_pickle=True loads it "
        "all the same; give it only for files of your own."
    )
