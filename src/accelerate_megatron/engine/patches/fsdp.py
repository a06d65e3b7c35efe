"""Fully sharded data parallelism, PyTorch's and Megatron's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron.engine.patches.patch import Patch, When
from accelerate_megatron.engine.versions import Version

_MEGATRON_FSDP = "megatron.core.distributed.fsdp"


def _take_the_argument(upstream: Any) -> Callable[..., Any]:
    def finish_grad_sync(self: Any, force_all_reduce: bool = False) -> Any:
        # Wrappers that know the argument override this; the others have nothing to force.
        return upstream(self)

    return finish_grad_sync


def _scale_before_the_sum(upstream: Any) -> Callable[..., Any]:
    def prepare(grad_data: torch.Tensor, scaling_factor: float | None, ddp_config: Any) -> Any:
        if scaling_factor is None or ddp_config.average_in_collective:
            return upstream(grad_data, scaling_factor, ddp_config)
        grad_data.mul_(scaling_factor)
        return dist.ReduceOp.SUM

    return prepare


class TELinearAbsent:
    """The class of Transformer Engine's linear layers where there are none."""


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
    Patch(
        module=f"{_MEGATRON_FSDP}.src.megatron_fsdp.param_and_grad_buffer",
        symbol="gradient_reduce_preprocessing",
        parameters=("grad_data", "scaling_factor", "ddp_config"),
        when=When.GLOO,
        replace=_scale_before_the_sum,
        why="it asks for NCCL's sum with a factor, which gloo has not",
    ),
    Patch(
        module=f"{_MEGATRON_FSDP}.mcore_fsdp_adapter",
        symbol="TELinear",
        may_be=lambda found: found is not None and not isinstance(found, type),
        may_be_text="an object that is not a class (without Transformer Engine, a mock)",
        when=When.NO_TRANSFORMER_ENGINE,
        replace=lambda _mock: TELinearAbsent,
        before=Version(0, 18, 0),
        why="isinstance of a module and something that is not a class is a TypeError",
    ),
)
