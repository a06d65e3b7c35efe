"""Linear layers with switches of their own: for the biases of attention, for dropout in the MLP.

Megatron has one switch, `add_bias_linear`, for the attention's output and the MLP together, and
it gives `linear_qkv` a bias too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from accelerate_megatron.engine.model_config import ModelConfig


class QKVLinear(ColumnParallelLinear):  # type: ignore[misc]  # megatron is untyped
    """`linear_qkv`, with a bias when `add_qkv_bias` says so."""

    def __init__(self, *args: Any, config: ModelConfig, bias: bool, **kwargs: Any) -> None:
        """Take what Megatron's `SelfAttention` gives; `bias` is replaced."""
        super().__init__(*args, config=config, bias=config.add_qkv_bias, **kwargs)


class OutputLinear(RowParallelLinear):  # type: ignore[misc]  # megatron is untyped
    """`linear_proj`, with a bias when `attention_output_bias` says so."""

    def __init__(self, *args: Any, config: ModelConfig, bias: bool, **kwargs: Any) -> None:
        """Take what Megatron's `Attention` gives; `bias` is replaced."""
        super().__init__(*args, config=config, bias=config.attention_output_bias, **kwargs)


class DroppingLinear(RowParallelLinear):  # type: ignore[misc]  # megatron is untyped
    """`linear_fc2` that drops some of what it is given, as `mlp_dropout` says."""

    def forward(self, input_: torch.Tensor) -> Any:
        """Return Megatron's output and bias; each rank drops other channels."""
        dropout = self.config.mlp_dropout if self.training else 0.0
        if dropout:
            input_ = self._drop(input_, dropout)
        return super().forward(input_)

    def _drop(self, input_: torch.Tensor, dropout: float) -> torch.Tensor:
        if self.config.sequence_parallel:  # the whole layer draws from the rank's own state
            return F.dropout(input_, dropout)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(input_, dropout)
