"""How one Megatron parameter is made of Hugging Face parameters. Data only, no torch.

A family's table maps Megatron's canonical parameter names (those that its
`sharded_state_dict()` writes with Transformer Engine's layers) to one of these kinds.
`weights/segments.py` gives each kind its meaning, for both directions at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Direct:
    """One Hugging Face tensor, unchanged.

    `transposed` for GPT-2's Conv1D weights; `in_fp32` for what transformers keeps in fp32
    whatever the model's dtype is.
    """

    hf: str
    transposed: bool = False
    in_fp32: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """One row per token; Megatron's tensor has rows of zeros after the last token."""

    hf: str


@dataclass(frozen=True)
class PackedQKV:
    """Three projections packed group by group: p queries, then their key, then their value."""

    q: str
    k: str
    v: str


@dataclass(frozen=True)
class StackedQKV:
    """The same packing, from one Hugging Face tensor that stacks all q, all k and all v."""

    hf: str
    transposed: bool = False


@dataclass(frozen=True)
class PackedKV:
    """The keys and values of cross attention packed head by head: its key, then its value."""

    k: str
    v: str


@dataclass(frozen=True)
class PackedGateUp:
    """The two projections of a gated MLP, gate above up."""

    gate: str
    up: str


@dataclass(frozen=True)
class StackedExperts:
    """All experts of a layer in one Hugging Face tensor, [experts, rows, columns]."""

    hf: str


@dataclass(frozen=True)
class SeparateExperts:
    """One Hugging Face tensor for each expert; `{expert}` in its name is the expert's index."""

    hf: str


@dataclass(frozen=True)
class SeparateGateUpExperts:
    """The gated MLP's two projections of each expert; `{expert}` is the expert's index."""

    gate: str
    up: str


Parameter = (
    Direct
    | Vocabulary
    | PackedQKV
    | StackedQKV
    | PackedKV
    | PackedGateUp
    | StackedExperts
    | SeparateExperts
    | SeparateGateUpExperts
)
"""`{layer}` in the names stands for the layer's index, from 0, in both vocabularies."""
