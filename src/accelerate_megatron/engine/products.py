"""Which library multiplies matrices while a model trains, where torch's own choice is slow."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate_megatron.engine.cpu_products import has_onednn
from accelerate_megatron.engine.wide_products import wide_products

_aten = torch.ops.aten
_X86 = ("x86_64", "AMD64")
_SMALLEST = 2**24
"""Multiplications of a product from which on oneDNN is worth what asking for it takes."""


def fast_products(chunks: list[torch.nn.Module]) -> AbstractContextManager[Any]:
    """Return a block in which products are fast, forward and backward; on most machines nothing.

    Nothing changes on GPUs, and where torch's choice is good. The machine decides, not a
    measurement, so that ranks on machines alike compute the same bits.

    Args:
        chunks: This rank's model chunks.
    """
    parameter = next((p for chunk in chunks for p in chunk.parameters()), None)
    if (
        parameter is not None
        and parameter.dtype == torch.float32
        and parameter.device.type == "cpu"
        and has_slow_mkl()
        and has_onednn()
    ):
        return OneDnnProducts()  # type: ignore[no-untyped-call]  # torch is untyped here
    return wide_products(chunks)


@cache
def has_slow_mkl() -> bool:
    """Return whether torch multiplies fp32 matrices by MKL on a CPU for which MKL is slow.

    With AVX-512 on an AMD EPYC (Zen 5, torch 2.13), one thread, MKL made 80 to 110 billion
    operations a second at the sizes of GPT-2's layers; oneDNN, in fp32 too, made 170 to 255 of the
    outputs and 120 to 250 of the gradients.
    """
    return (
        platform.machine() in _X86
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and _vendor() == "AuthenticAMD"
    )


class OneDnnProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """Computes large products of fp32 matrices by oneDNN, forward and backward."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        if not types and not kwargs:
            if func is _aten.mm.default and _is_large(*args):
                return _product(args[0], args[1].t(), None)
            if func is _aten.addmm.default and args[0].dim() == 1 and _is_large(*args[1:]):
                return _product(args[1], args[2].t(), args[0])
        return func(*args, **(kwargs or {}))


def _is_large(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether oneDNN is to compute a b, of [m, k] and [k, n]."""
    is_fp32 = a.dtype == b.dtype == torch.float32
    return is_fp32 and a.numel() * b.shape[1] >= _SMALLEST


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x weight^T + bias, of [m, k], [n, k] and [n]."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _vendor() -> str:
    """Return the CPU's vendor as the CPU itself gives it; empty where the system does not say."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists():
        return ""
    lines = facts.read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
