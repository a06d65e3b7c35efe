"""The named patches: what Megatron-Core gets wrong without CUDA or without Transformer Engine.

One file per subject. Each patch names the symbol it replaces, the versions, where it is
needed and why, and refuses to apply to anything but what it was written for. To add one:
write it in the file of its subject and list it in that file's `PATCHES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_megatron.engine.patches import (
    communication,
    fsdp,
    moe,
    offload,
    optimizer,
    random,
    versions,
)
from accelerate_megatron.engine.patches.patch import Patch, Surroundings, When

__all__ = ["PATCHES", "Patch", "Surroundings", "When", "patches_of"]

PATCHES: tuple[Patch, ...] = (
    *versions.PATCHES,
    *random.PATCHES,
    *optimizer.PATCHES,
    *communication.PATCHES,
    *moe.PATCHES,
    *fsdp.PATCHES,
    *offload.PATCHES,
)


def patches_of(module: str, surroundings: Surroundings) -> Sequence[Patch]:
    """Return the patches of one module of Megatron-Core that are needed in `surroundings`."""
    return [patch for patch in PATCHES if patch.module == module and patch.is_needed(surroundings)]
