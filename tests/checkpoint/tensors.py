"""Reading the tensors of a checkpoint without any of the code that loads them."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import torch

from tests.helpers.tiny_models import VOCAB_SIZE


def data_folder(checkpoint: str | Path) -> Path:
    """Return the folder of a checkpoint's data."""
    checkpoint = Path(checkpoint)
    return checkpoint / json.loads((checkpoint / "manifest.json").read_text())["folder"]


def global_tensors(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    """Return all tensors, whole, the padding of the vocabulary cut off."""
    folder = data_folder(checkpoint) / "tensors"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensors = {
        name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }
    for index, place in metadata.storage_data.items():
        content = (folder / place.relative_path).read_bytes()
        piece = torch.load(io.BytesIO(content[place.offset : place.offset + place.length]))
        target = tensors[index.fqn]
        for dim, (offset, size) in enumerate(zip(index.offset, piece.shape, strict=True)):
            target = target.narrow(dim, offset, size)
        target.copy_(piece)
    return {
        name: tensor[:VOCAB_SIZE] if "word_embeddings" in name or "output_layer" in name else tensor
        for name, tensor in tensors.items()
    }
