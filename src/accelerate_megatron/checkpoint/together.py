"""What ranks do together around files: each does its part, and all return or all raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from accelerate_megatron import failures
from accelerate_megatron.errors import CheckpointError

T = TypeVar("T")


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `action` on each rank; return what it returned, by rank. Every rank calls it.

    Communicates over `group`, one of all ranks; None is the default one.

    Raises:
        CheckpointError: It failed on some rank; raised alike on all, with the ranks' names. Other
            errors of this package keep their type.
    """
    return failures.on_every_rank(
        action, lambda value: _gather(value, group), otherwise=CheckpointError
    )


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on rank 0 and return its result on every rank; errors as `on_every_rank`."""
    return failures.on_one_rank(
        action if dist.get_rank() == 0 else None,
        lambda value: _gather(value, group)[0],
        otherwise=CheckpointError,
    )


def run_hooks(hooks: Sequence[Callable[[], Any]]) -> None:
    """Run a user's hooks, of which ranks may have different numbers. Every rank calls it.

    What they return is dropped; errors as `on_every_rank`.
    """
    for index in range(max(on_every_rank(lambda: len(hooks)))):
        on_every_rank(partial(_run, hooks[index : index + 1]))


def _run(hooks: Sequence[Callable[[], Any]]) -> None:
    for hook in hooks:
        hook()


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values
