"""PyTorch's fully sharded data parallelism inside Megatron's wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_megatron.engine.patches.patch import Patch, When
from accelerate_megatron.engine.versions import Version


def _take_the_argument(upstream: Any) -> Callable[..., Any]:
    def finish_grad_sync(self: Any, force_all_reduce: bool = False) -> Any:
        # Wrappers that know the argument override this; the others have nothing to force.
        return upstream(self)

    return finish_grad_sync


PATCHES = (
    Patch(
        module="megatron.core.distributed.data_parallel_base",
        symbol="_BaseDataParallel.finish_grad_sync",
        parameters=("self",),
        when=When.ALWAYS,
        replace=_take_the_argument,
        before=Version(0, 19, 0),
        why=(
            "finalize_model_grads passes force_all_reduce to every wrapper, and the one for "
            "PyTorch's FSDP inherits this: a TypeError"
        ),
    ),
)
