"""In a notebook: one rank, and how to get more."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from accelerate_megatron.log import get_logger

logger = get_logger(__name__)

LINE = "accelerate-megatron launch --num_processes N --tp_degree N script.py"


def is_notebook() -> bool:
    """Return whether this process is a notebook's kernel, which nobody has launched as ranks."""
    return "ipykernel" in sys.modules and "WORLD_SIZE" not in os.environ


def say_how_to_get_more_ranks() -> None:
    """Say once that a notebook is one rank, with the line that starts more; else nothing."""
    if is_notebook() and not dist.is_initialized():
        logger.warning(
            "A notebook's kernel is one rank: tp_degree, pp_degree and the like are 1 here. For "
            "more ranks put the training into a function, Accelerator included, for "
            "accelerate.notebook_launcher(function, num_processes=N), or into a script and start "
            "it with: %s",
            LINE,
        )
