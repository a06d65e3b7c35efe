"""Half-precision products on CPUs that have no instructions for them: computed in fp32, rounded.

torch (2.13) then multiplies number by number: a product of 1024 x 1024 matrices in bf16 took 40
times as long as in fp32 on a CPU with AVX2 (AMD EPYC 7003). What is kept and sent stays in half
precision.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten.matmul.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
if hasattr(_aten, "_grouped_mm"):  # not in torch 2.6
    _PRODUCTS.add(_aten._grouped_mm.default)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_HALF = (torch.bfloat16, torch.float16)
_X86 = ("x86_64", "AMD64")
_WITHOUT_HALF = ("AVX2", "NO AVX", "DEFAULT")
"""Capabilities of x86 CPUs for which oneDNN has no products in half precision."""


def wide_products(chunks: Iterable[torch.nn.Module]) -> AbstractContextManager[Any]:
    """Return a block in which products are fast, also in half precision; on most machines nothing.

    Nothing changes for parameters in fp32, on GPUs, and on CPUs that multiply in half precision.

    Args:
        chunks: This rank's model chunks.
    """
    parameter = next((p for chunk in chunks for p in chunk.parameters()), None)
    if parameter is None or parameter.device.type != "cpu" or parameter.dtype not in _HALF:
        return nullcontext()
    if not multiplies_slowly():
        return nullcontext()
    return _WideProducts()  # type: ignore[no-untyped-call]  # torch is untyped here


def multiplies_slowly() -> bool:
    """Return whether products in half precision are emulated number by number on this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    return platform.machine() in _X86 and capability in _WITHOUT_HALF


class _WideProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """Computes products of half-precision tensors in fp32, forward and backward."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        is_product = func in _PRODUCTS or func is _ATTENTION
        if types or not is_product or not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        dtype = args[0].dtype
        if dtype not in _HALF:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        results = func(*args, **kwargs)
        if func is _ATTENTION:  # its second result, of each row, is in fp32 anyway
            return results[0].to(dtype), *results[1:]
        return tree_map_only(torch.Tensor, lambda result: result.to(dtype), results)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
