"""Megatron's linear layers with nothing but their product, for one token at a time.

Megatron's forward prepares a backward pass in several autograd functions, which costs more than
the product of one token does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

Output = tuple[torch.Tensor, "torch.Tensor | None"]
"""What Megatron's linear layers return: the product, and the bias where it is left to add."""


@contextmanager
def lean_linear_layers(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let linear layers among `modules` compute without gradients inside the block.

    Those of experts keep Megatron's forward, which may exchange tokens in them.
    """
    changed: list[Any] = []
    try:
        for module in modules:
            if getattr(module, "is_expert", False):
                continue
            if isinstance(module, ColumnParallelLinear) and not module.gather_output:
                module.forward = partial(_columns, module)
                changed.append(module)
            elif isinstance(module, RowParallelLinear) and module.input_is_parallel:
                module.forward = partial(_rows, module)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward  # the class's own is seen again


def _columns(layer: Any, inputs: torch.Tensor, weight: torch.Tensor | None = None) -> Output:
    """Return this rank's part of the outputs; `weight` is a tied embedding's."""
    weight = layer.weight if weight is None else weight
    if layer.skip_bias_add:
        return F.linear(inputs, weight), layer.bias
    return F.linear(inputs, weight, layer.bias), None


def _rows(layer: Any, inputs: torch.Tensor) -> Output:
    """Return the outputs, added up over the tensor-parallel ranks."""
    partial_sum = F.linear(inputs, layer.weight)
    if layer.tp_group.size() > 1:
        dist.all_reduce(partial_sum, group=layer.tp_group)
    if layer.skip_bias_add:
        return partial_sum, layer.bias
    return partial_sum if layer.bias is None else partial_sum + layer.bias, None
