"""What weights are copied into and out of: a rank's piece of one Megatron parameter.

The engine makes these from a model; nothing here knows Megatron.
"""

from __future__ import annotations

from typing import Protocol

import torch


class ParameterShard(Protocol):
    """A rank's piece of a parameter, and where it lies in the whole one."""

    @property
    def name(self) -> str:
        """Canonical Megatron name, with the layer's index in the whole model."""

    @property
    def data(self) -> torch.Tensor:
        """A view of this rank's piece: writing to it writes the parameter."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter; the vocabulary's rows include the padding."""

    @property
    def global_offset(self) -> tuple[int, ...]:
        """Where `data` starts in the whole parameter."""

    @property
    def is_main_replica(self) -> bool:
        """Whether this is the one copy of this piece that counts; one rank holds it."""
