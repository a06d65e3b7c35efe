"""Checkpoints that somebody has prepared: payloads, in files that are otherwise right."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.tensors import data_folder


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


def recompute_manifest(checkpoint: Path) -> None:
    """Let the manifest agree with the files, as somebody who prepared them would."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    folder = data_folder(checkpoint)
    for name in list(manifest["files"]):
        file = folder / name
        if file.exists():
            content = file.read_bytes()
            manifest["files"][name] = {
                "num_bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    path.write_text(json.dumps(manifest))


def in_metadata(checkpoint: Path, payload: Payload) -> None:
    """The whole index is the payload."""
    (data_folder(checkpoint) / "tensors/.metadata").write_bytes(pickle.dumps(payload))


def in_a_right_metadata(checkpoint: Path, payload: Payload) -> None:
    """The payload stands in a field of an index that is right otherwise."""
    path = data_folder(checkpoint) / "tensors/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {"x": payload}
    path.write_bytes(pickle.dumps(metadata))


def in_a_tensor(checkpoint: Path, payload: Payload) -> None:
    """The payload stands where the index has a tensor."""
    folder = data_folder(checkpoint) / "tensors"
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    stream = io.BytesIO()
    torch.save([payload], stream)
    name, place = next(
        (index, place)
        for index, place in metadata.storage_data.items()
        if index.fqn == "decoder.final_layernorm.weight"
    )
    file = folder / place.relative_path
    start = file.stat().st_size
    with open(file, "ab") as target:
        target.write(stream.getvalue())
    place.offset, place.length = start, len(stream.getvalue())
    metadata.storage_data[name] = place
    path.write_bytes(pickle.dumps(metadata))


def in_common(checkpoint: Path, payload: Payload) -> None:
    torch.save({"iteration": payload}, data_folder(checkpoint) / "tensors/common.pt")


def in_registered(checkpoint: Path, payload: Payload) -> None:
    torch.save({"steps": payload}, data_folder(checkpoint) / "custom_checkpoint_0.pkl")


def in_registered_bare(checkpoint: Path, payload: Payload) -> None:
    """Not even a file of torch's."""
    (data_folder(checkpoint) / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(payload))


def names_a_file_outside(checkpoint: Path) -> None:
    """The index says that the tensors are in a file elsewhere."""
    folder = data_folder(checkpoint) / "tensors"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    outside = checkpoint.parent / "outside.distcp"
    file = folder / "__0_0.distcp"
    outside.write_bytes(file.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = os.path.relpath(outside, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def links_outside(checkpoint: Path) -> None:
    """The file of the tensors is a link."""
    file = data_folder(checkpoint) / "tensors/__0_0.distcp"
    outside = checkpoint.parent / "outside.distcp"
    os.rename(file, outside)
    file.symlink_to(outside)


def manifest_names_a_folder_outside(checkpoint: Path) -> None:
    """The manifest says that the data is elsewhere."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["folder"] = "../elsewhere"
    path.write_text(json.dumps(manifest))


def manifest_names_a_file_outside(checkpoint: Path) -> None:
    """The manifest lists a file elsewhere."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../secret"] = {"num_bytes": 1, "sha256": "0"}
    path.write_text(json.dumps(manifest))
