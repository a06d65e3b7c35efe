"""LayerNorm and RMSNorm for the layer spec, without Apex or Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's, whose input gets one gradient from it, as a LayerNorm's does.

    On the CPU it is made of several operations. Each would add to the gradient of the residual
    stream by itself, and in another order when the norm is recomputed: other bits.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dim."""
        return super().forward(x.view_as(x))


class Norm:
    """Build torch's norm for a config; Megatron's own wrapper refuses sequence parallelism.

    Under sequence parallelism each tensor-parallel rank normalises its part of the
    sequence, so the gradients of the norm's parameters are partial sums. The mark
    `sequence_parallel` on them is what makes Megatron's `finalize_model_grads` add them up.
    """

    def __new__(  # type: ignore[misc]  # a spec submodule is called like the module it makes
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """Return `RMSNorm` or `torch.nn.LayerNorm` over the last dim."""
        kind = RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
