"""Which files of a Hugging Face folder hold which tensors, each checked before it is opened."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.weights.checks import collapse_layers

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MAX_INDEX_BYTES = 200 * 2**20
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights of a whole model. Reads nothing."""
    return any((folder / name).is_file() for name in (*SINGLE_FILES, *INDEX_FILES))


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the folder's weight files, and the index's map of tensor to file if it has one.

    safetensors files come before pickled ones, one whole file before an index: the order in
    which transformers looks.

    Raises:
        WeightsError: There are none, files are missing or lie outside the folder, or the index
            is not one.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder} is no folder; name the folder of a Hugging Face model.")
    for single, index in zip(SINGLE_FILES, INDEX_FILES, strict=True):
        if (folder / single).is_file():
            return [_inside(folder, single, single)], None
        if (folder / index).is_file():
            weight_map = _read_index(_inside(folder, index, index))
            return _indexed_files(folder, index, weight_map), weight_map
    adapters = [name for name in _ADAPTER_FILES if (folder / name).is_file()]
    also = f" It holds {adapters[0]}, an adapter without its model." if adapters else ""
    raise WeightsError(
        f"{folder} holds none of {', '.join((*SINGLE_FILES, *INDEX_FILES))}.{also} Save a model "
        "there with save_pretrained, or name another folder."
    )


def _indexed_files(folder: Path, index: str, weight_map: dict[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    paths = [_inside(folder, name, index) for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise WeightsError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that {index} names: "
            f"{', '.join(missing)}. Copy or download them again."
        )
    return paths


def _read_index(path: Path) -> dict[str, str]:
    size = path.stat().st_size
    if size > _MAX_INDEX_BYTES:
        raise WeightsError(
            f"{path} has {size} bytes, more than the {_MAX_INDEX_BYTES} that an index of weights "
            "can have; copy or download it again."
        )
    try:
        index: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error}); copy or download it again.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(
            f"{path} has no weight_map of tensor names to file names; copy or download it again."
        )
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(
            f"{path} has a weight_map whose values are not all file names; copy or download it "
            "again."
        )
    return weight_map


def _inside(folder: Path, name: str, where: str) -> Path:
    """Return `folder / name` after checking that it really lies in the folder.

    A link may lead into the `blobs` of the same repository's download cache, and nowhere else.
    """
    is_plain = (
        name not in ("", ".", "..")
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )
    if not is_plain:
        raise WeightsError(
            f"{folder / where} names the file {name!r}; it must be a plain name of a file in "
            "the folder itself."
        )
    path, root = folder / name, folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":  # of huggingface_hub's cache
        allowed.append(root.parent.parent / "blobs")
    target = path.resolve()
    if target.parent not in allowed:
        raise WeightsError(
            f"{path} is a link to {target}, outside the folder; put the file itself there."
        )
    return path


def check_index(folder: Path, weight_map: dict[str, str] | None, found: dict[str, str]) -> None:
    """Check that the files hold what the index says.

    Args:
        folder: The folder.
        weight_map: The index's map of tensor to file; None without an index.
        found: The file that each tensor was found in.

    Raises:
        WeightsError: A tensor is in another file than the index says, or in none.
    """
    if weight_map is None:
        return
    problems = []
    for title, names in (
        ("in the index only", weight_map.keys() - found.keys()),
        ("in the files only", found.keys() - weight_map.keys()),
        (
            "in another file",
            [n for n in weight_map if found.get(n, "") != weight_map[n] and n in found],
        ),
    ):
        if names:
            problems.append(f"{len(names)} {title}: {', '.join(collapse_layers(names))}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise WeightsError(f"The index of {folder} does not fit its files:{listed}")


def canonical_names(
    names: Iterable[str], expected: Iterable[str], prefix: str, extras: Iterable[str]
) -> dict[str, str]:
    """Return the name in a file of each tensor, by the name that the model has for it.

    A folder saved from the model without its head lacks the prefix in all its names. Names of
    what is no weight are left out.

    Args:
        names: Those in the files.
        expected: Those of the model.
        prefix: What the names of the model without head lack, without the dot.
        extras: Regular expressions of names that are passed over, unless the model has them.
    """
    names, wanted = list(names), set(expected)
    is_headless = not any(name.startswith(f"{prefix}.") for name in names)
    passed_over = re.compile("|".join(extras)) if extras else None
    canonical = {}
    for name in names:
        full = name if name in wanted or not is_headless else f"{prefix}.{name}"
        if full in wanted or passed_over is None or not passed_over.fullmatch(full):
            canonical[full] = name
    return canonical
