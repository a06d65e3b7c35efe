"""Optimizer state offloaded to the host, in a process that has nothing but the host."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from accelerate_megatron.engine.patches.patch import Patch, When


def _offload_nothing(upstream: Any) -> Callable[..., Any]:
    def groups(self: Any, offload_fraction: float) -> Any:
        return upstream(self, 0.0)

    return groups


def _take_views(upstream: Any) -> Callable[..., None]:
    @functools.wraps(upstream)
    def initialise(self: Any, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        params = list(params)
        for group in params:
            tensors = group["params"] if isinstance(group, dict) else [group]
            for tensor in tensors:
                if not tensor.is_leaf:
                    tensor.retain_grad()  # what torch's optimizers ask of a tensor that is no leaf
        upstream(self, params, *args, **kwargs)

    return initialise


PATCHES = (
    Patch(
        module="megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        symbol="HybridDeviceOptimizer.__init__",
        may_be=lambda found: list(inspect.signature(found).parameters)[:2] == ["self", "params"],
        may_be_text="a function of the parameters first",
        when=When.ALWAYS,
        replace=_take_views,
        why=(
            "the distributed optimizer builds it anew over its shards, which in fp32 are views of "
            "parameters: torch's optimizer refuses them"
        ),
    ),
    Patch(
        module="megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        symbol="HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        parameters=("self", "offload_fraction"),
        when=When.NO_CUDA,
        replace=_offload_nothing,
        why=(
            "it tells the copies on the host from the parameters on the device by their device; "
            "here both are on the CPU, and the copies would be trained in place of the "
            "parameters, silently. All state is in host memory already"
        ),
    ),
)
