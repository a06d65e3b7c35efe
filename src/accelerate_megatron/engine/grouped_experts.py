"""The experts of a rank as one grouped matrix product, on torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from accelerate_megatron.errors import EngineError


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # megatron is untyped
    """Megatron's sequential experts, with the same parameters, computed together.

    One expert after the other leaves a GPU idle where experts are small and many. Megatron's own
    grouped experts need Transformer Engine or the package grouped_gemm, keep their weights in
    another form, and run in bf16 only.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Return the weighted outputs of the experts, [tokens, hidden], and no bias.

        Args:
            permuted_local_hidden_states: Tokens sorted by expert, [tokens, hidden].
            tokens_per_expert: How many of them each local expert gets, [local experts].
            permuted_probs: The weight of each token, [tokens].
        """
        tokens = permuted_local_hidden_states
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        states = _grouped_linear(tokens, [e.linear_fc1.weight for e in self.local_experts], ends)
        if self.config.gated_linear_unit:
            gate, up = states.chunk(2, dim=-1)
            states = self.config.activation_func(gate) * up
        else:
            states = self.config.activation_func(states)
        states = (states * permuted_probs.unsqueeze(-1)).to(tokens.dtype)
        weights = [expert.linear_fc2.weight for expert in self.local_experts]
        return _grouped_linear(states, weights, ends), None


def _grouped_linear(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor
) -> torch.Tensor:
    """Multiply consecutive rows by one weight each, [out, in]; expert n's rows end at `ends[n]`."""
    if rows.shape[0] == 0:
        # No kernel for nothing; but the weights are to get gradients, of zeros.
        return torch.cat([rows @ weight.t() for weight in weights])
    result: torch.Tensor = F.grouped_mm(
        rows.contiguous(), torch.stack(list(weights)).transpose(1, 2), offs=ends
    )
    return result


def grouped(experts: Any) -> Any:
    """Return the spec of sequential experts with `GroupedExperts` in their place.

    Raises:
        EngineError: torch is too old.
    """
    if not hasattr(F, "grouped_mm"):
        raise EngineError(
            f"moe_grouped_gemm is True, which needs torch.nn.functional.grouped_mm, and torch "
            f"{torch.__version__} has none. Install a newer torch, or leave moe_grouped_gemm out."
        )
    if isinstance(experts, partial):
        return partial(GroupedExperts, *experts.args, **experts.keywords)
    return ModuleSpec(module=GroupedExperts, submodules=experts.submodules)
