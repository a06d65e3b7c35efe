"""Experts behind a sigmoid router with a correction bias, as GLM-4.5 and DeepSeek-V3 have them.

Some first layers are dense, and a shared expert processes every token. No torch here.
"""

from __future__ import annotations

from typing import Any

from accelerate_megatron.models.expert_fields import (
    dense_first_problems,
    group_problems,
    shared_problems,
    sigmoid_problems,
    top_k_problems,
)
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.hf_config import required


def sigmoid_experts_problems(config: Any) -> list[str]:
    """Say what the engine cannot represent of such a config; empty when it can all."""
    num_experts = required(config, "n_routed_experts")
    normalized = required(config, "norm_topk_prob")
    return [
        *top_k_problems(config, num_experts=num_experts, normalized=normalized),
        *sigmoid_problems(config),
        *group_problems(config),
        *shared_problems(config),
        *dense_first_problems(config),
    ]


def sigmoid_experts(config: Any) -> Experts:
    """Translate the fields about experts; `sigmoid_experts_problems` comes first."""
    width = required(config, "moe_intermediate_size")
    return Experts(
        num_experts=required(config, "n_routed_experts"),
        top_k=required(config, "num_experts_per_tok"),
        ffn_hidden_size=width,
        score="sigmoid",
        normalize_top_k=required(config, "norm_topk_prob"),
        scaling_factor=float(required(config, "routed_scaling_factor")),
        num_groups=required(config, "n_group"),
        top_groups=required(config, "topk_group"),
        correction_bias=True,
        shared_ffn_hidden_size=width * required(config, "n_shared_experts"),
        dense_layers=tuple(range(required(config, "first_k_dense_replace"))),
    )
