"""`manifest.json`: what a checkpoint is made of. A folder with one is complete, without is none.

It names the folder of the data, each file in it with size and checksum, and in `run` what the run
was. It is written last, and replaced in one step.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from accelerate_megatron.checkpoint.files import FileFacts, facts_of
from accelerate_megatron.errors import CheckpointError, UnsafeCheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = "accelerate-megatron"
FORMAT_VERSION = 1

TENSORS = "tensors"
"""The folder of the tensors, in the folder of the data: Megatron-Core's torch_dist format."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    checkpoint_id: str
    """Different for each save."""
    folder: str
    """Name of the folder of the data, beside the manifest."""
    step: int
    """Updates done."""
    created: float
    """Seconds since 1970."""
    has_optimizer: bool
    run: Mapping[str, Any]
    """What the run was: layout, model, precision, versions."""
    files: Mapping[str, FileFacts]
    """Path in the folder of the data -> size and checksum."""

    def to_json(self) -> str:
        """Return the text of the file."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, indent=1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(facts.num_bytes for facts in self.files.values())


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the checkpoint in the folder `checkpoint`.

    Raises:
        CheckpointError: There is no complete checkpoint, or one that this version cannot read.
    """
    path = checkpoint / MANIFEST_NAME
    _check_there(checkpoint)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} holds no complete checkpoint: it has no {MANIFEST_NAME}. "
            f"{_what_is_there(checkpoint)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _parse(content, path)


def _check_there(checkpoint: Path) -> None:
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint}: there is no such folder, so nothing can be loaded.")
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is a file; a checkpoint is a folder.")


def _what_is_there(checkpoint: Path) -> str:
    names = sorted(path.name for path in checkpoint.iterdir())
    if not names:
        return "It is empty."
    inside = [name for name in names if (checkpoint / name / MANIFEST_NAME).is_file()]
    if inside:
        return f"It holds checkpoints: give one of them ({', '.join(inside[:5])})."
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"It holds {shown}."


def _parse(content: Any, path: Path) -> Manifest:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of {FORMAT}.")
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this version of {FORMAT} reads up to "
            f"{FORMAT_VERSION}. Load it with the version that wrote it, or a newer one."
        )
    try:
        manifest = Manifest(
            checkpoint_id=str(content["checkpoint_id"]),
            folder=str(content["folder"]),
            step=int(content["step"]),
            created=float(content["created"]),
            has_optimizer=bool(content["has_optimizer"]),
            run=dict(content["run"]),
            files={
                str(name): FileFacts(int(facts["num_bytes"]), str(facts["sha256"]))
                for name, facts in content["files"].items()
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    _check_paths(manifest, path)
    return manifest


def _check_paths(manifest: Manifest, path: Path) -> None:
    """Refuse names that lead out of the folder."""
    names = [manifest.folder, *manifest.files]
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise UnsafeCheckpointError(f"{path} names {name!r}, which is outside of the folder.")
    if len(PurePosixPath(manifest.folder).parts) != 1:
        raise UnsafeCheckpointError(f"{path} has its data in {manifest.folder!r}, not beside it.")


def file_problems(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return what is wrong with the files `names`: missing, a link, truncated, or changed."""
    return [
        f"{manifest.folder}/{name} {problem}"
        for name in names
        if (problem := _problem(checkpoint / manifest.folder, name, manifest.files[name]))
    ]


def _problem(data: Path, name: str, expected: FileFacts) -> str:
    path = data / name
    try:
        if path.resolve().parent != (data.resolve() / name).parent or data.is_symlink():
            return "leads out of the folder by a link"
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is no regular file"
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"has {size} bytes and should have {expected.num_bytes}"
        if facts_of(path).sha256 != expected.sha256:
            return "has changed since it was written (its checksum is another one)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""
