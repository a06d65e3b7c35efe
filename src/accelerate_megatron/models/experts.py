"""What the experts of a mixture-of-experts model look like. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The MoE layers of a model: routed experts, their router, and shared experts.

    In each of these layers a router scores all experts for a token, the `top_k` best ones
    process it, and their outputs are added up, weighted by the scores.
    """

    num_experts: int
    """Routed experts of one layer, over all ranks."""
    top_k: int
    """Experts that process a token."""
    ffn_hidden_size: int
    """Width of one routed expert; of one of its two halves when the MLP is gated."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's logits into scores."""
    normalize_top_k: bool = True
    """Whether the scores of the chosen experts are made to add up to 1."""
    scaling_factor: float = 1.0
    """Factor on the weights of the chosen experts."""
    num_groups: int = 1
    """Groups of experts; a token's experts come from its `top_groups` best ones."""
    top_groups: int = 1
    correction_bias: bool = False
    """Whether a bias, which no gradient moves, is added to the scores for choosing only."""
    shared_ffn_hidden_size: int | None = None
    """Width of the expert that processes every token; None without one."""
    shared_gate: bool = False
    """Whether the shared expert's output is weighted by a sigmoid gate."""
    dense_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that have an ordinary MLP instead of experts."""
    balance_coefficient: float = 0.0
    """Factor of Hugging Face's load-balancing loss; 0: the config asks for none."""

    def are_in(self, layer: int) -> bool:
        """Return whether layer `layer`, counted from 0, has experts."""
        return layer not in self.dense_layers
