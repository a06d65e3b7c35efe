"""What stands on an encoder, on the last pipeline stage: the same on each tensor-parallel rank."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.engine.norm import Norm


class LanguageHead(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """The layer between the encoder and the output layer of a masked language model.

    Under sequence parallelism each rank has some tokens, so gradients of its parameters are
    partial sums; the mark on them makes Megatron add them up.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config=config)
        self.dense = torch.nn.Linear(config.hidden_size, config.hidden_size)
        for parameter in self.dense.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h] for [s, b, h]; s is this rank's part of the sequence."""
        activated = self.config.activation_func(self.dense(hidden_states))
        normalised: torch.Tensor = self.layer_norm(activated)
        return normalised


class Pooler(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """A layer on the first token's hidden state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config=config)
        self.dense = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [b, h], the same on all tensor-parallel ranks, for [s, b, h] of all tokens."""
        return torch.tanh(self.dense(hidden_states[0]))


def all_tokens(hidden_states: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Return the hidden states of all tokens, [s, b, h], on each tensor-parallel rank.

    What follows is computed by each of the ranks alike, so each gets its own part of the
    gradient back.
    """
    if not config.sequence_parallel:
        return hidden_states
    whole: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(
        hidden_states, tensor_parallel_output_grad=False
    )
    return whole
