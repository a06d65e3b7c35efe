"""Rows of parameter tables for layers with experts. No torch here.

transformers 5 keeps the experts of a layer in two stacked tensors in memory, and writes one
tensor for each expert and projection to disk, under the names that the models were published
with. So a family with experts has two tables: the one of the live model, and the one of its
folders.
"""

from __future__ import annotations

from accelerate_megatron.models.decoder_rows import HF, LAYER, Rows
from accelerate_megatron.models.parameters import (
    Direct,
    PackedGateUp,
    SeparateExperts,
    SeparateGateUpExperts,
    StackedExperts,
)

_EXPERTS = f"{LAYER}.mlp.experts.experts"
_SHARED = f"{LAYER}.mlp.shared_experts"

NORM: Rows = {f"{LAYER}.pre_mlp_layernorm.weight": Direct(f"{HF}.post_attention_layernorm.weight")}
ROUTER: Rows = {f"{LAYER}.mlp.router.weight": Direct(f"{HF}.mlp.gate.weight")}
CORRECTED_ROUTER: Rows = {
    f"{LAYER}.mlp.router.weight": Direct(f"{HF}.mlp.gate.weight", in_fp32=True),
    f"{LAYER}.mlp.router.expert_bias": Direct(
        f"{HF}.mlp.gate.e_score_correction_bias", in_fp32=True
    ),
}
STACKED: Rows = {
    f"{_EXPERTS}.linear_fc1.weight": StackedExperts(f"{HF}.mlp.experts.gate_up_proj"),
    f"{_EXPERTS}.linear_fc2.weight": StackedExperts(f"{HF}.mlp.experts.down_proj"),
}
SEPARATE: Rows = {
    f"{_EXPERTS}.linear_fc1.weight": SeparateGateUpExperts(
        gate=f"{HF}.mlp.experts.{{expert}}.gate_proj.weight",
        up=f"{HF}.mlp.experts.{{expert}}.up_proj.weight",
    ),
    f"{_EXPERTS}.linear_fc2.weight": SeparateExperts(
        f"{HF}.mlp.experts.{{expert}}.down_proj.weight"
    ),
}


def shared_rows(name: str) -> Rows:
    """Return the rows of the shared expert, which Hugging Face calls `name`."""
    return {
        f"{_SHARED}.linear_fc1.weight": PackedGateUp(
            gate=f"{HF}.mlp.{name}.gate_proj.weight", up=f"{HF}.mlp.{name}.up_proj.weight"
        ),
        f"{_SHARED}.linear_fc2.weight": Direct(f"{HF}.mlp.{name}.down_proj.weight"),
    }


SIGMOID: Rows = {**NORM, **CORRECTED_ROUTER, **STACKED, **shared_rows("shared_experts")}
"""Of a layer with experts behind a corrected sigmoid router, and a shared one."""
