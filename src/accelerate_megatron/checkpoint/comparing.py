"""Whether a checkpoint is one of this model: names and shapes, before anything is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

Shapes = Mapping[str, tuple[tuple[int, ...], bool]]
"""Name -> (global shape, whether the first dimension is padded and may differ)."""

OPTIMIZER = "optimizer."
COPIES = "optimizer.state.fp32_param."
"""In front of a parameter's name: its fp32 copy, which may be read in its place."""
_MOST_SHOWN = 12


def saved_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Return name -> global shape of the tensors in a checkpoint."""
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def differences(
    saved: Mapping[str, tuple[int, ...]], wanted: Shapes, *, with_optimizer: bool
) -> list[str]:
    """Return what differs, one line for each name; empty when the checkpoint fits.

    Args:
        saved: Names and shapes in the checkpoint.
        wanted: Those of the model and its optimizer, over all ranks.
        with_optimizer: Whether the optimizer's tensors are read too.
    """
    lines = []
    for name in sorted(wanted):
        shape, is_padded = wanted[name]
        if name not in saved:
            lines.append(f"{name}: {_text(shape)} here, not in the checkpoint")
        elif saved[name] != shape and not (is_padded and saved[name][1:] == shape[1:]):
            lines.append(f"{name}: {_text(shape)} here, {_text(saved[name])} in the checkpoint")
    for name in sorted(saved):
        is_read = with_optimizer or not name.startswith(OPTIMIZER)
        is_known = name in wanted or f"{COPIES}{name}" in wanted or name.endswith("_extra_state")
        if is_read and not is_known:
            lines.append(f"{name}: {_text(saved[name])} in the checkpoint, not here")
    return lines


def setting_differences(saved: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Return the settings of the model that differ from those in the manifest.

    Only such as change what the weights mean; dropout and the like may change.
    """
    telling = (
        "model_type",
        "vocab_size",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "position_embedding",
        "activation",
        "normalization",
    )
    return [
        f"{name} is {model[name]!r} here and {saved[name]!r} in the checkpoint"
        for name in telling
        if name in saved and name in model and saved[name] != model[name]
    ]


def shown(lines: Iterable[str]) -> str:
    """Return the lines as an indented list, cut when there are many."""
    every = list(lines)
    rest = len(every) - _MOST_SHOWN
    listed = every[:_MOST_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
    return "".join(f"\n  - {line}" for line in listed)


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
