"""Seeing through the wrappers that Megatron puts around a model chunk."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel


def innermost(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside the wrappers; theirs prefix "module." to every name."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def finish_parameter_gather(chunks: Iterable[torch.nn.Module]) -> None:
    """Make sure that every rank has the weights of the last update. Every rank calls it.

    With `overlap_param_gather` they are gathered when the next forward pass asks for them.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
