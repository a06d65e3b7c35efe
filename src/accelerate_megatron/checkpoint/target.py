"""Where one save goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accelerate_megatron.checkpoint import folders

CHECKPOINTS = "checkpoints"
"""The folder of numbered checkpoints, in the project's folder."""


@dataclass(frozen=True)
class Target:
    """Where one save goes; the same on all ranks.

    Attributes:
        checkpoint: The folder that the checkpoint will be.
        checkpoint_id: Different for each save.
        is_automatic: Whether the folder is one of the project's numbered ones.
        total_limit: How many of those are kept; None: all.
    """

    checkpoint: Path
    checkpoint_id: str
    is_automatic: bool
    total_limit: int | None = None

    @property
    def temporary(self) -> Path:
        """The hidden folder that is written to."""
        return folders.temporary_folder(self.checkpoint, self.checkpoint_id)

    @property
    def folder(self) -> str:
        """Name of the folder of the data in the checkpoint."""
        return f"state-{self.checkpoint_id}"

    @property
    def data(self) -> Path:
        """The folder of the data while it is written."""
        return self.temporary / self.folder


def no_space(target: Target, num_bytes: int, free: int) -> str:
    """Return what to say when the disk is full."""
    return (
        f"There is not enough space for the checkpoint {target.checkpoint}: it needs {num_bytes} "
        f"bytes and {free} are free. Nothing was changed; training can go on."
    )
