"""Experts behind a sigmoid router with a correction bias, as GLM-4.5 and DeepSeek-V3 have them.

Some first layers are dense, and a shared expert processes every token. No torch here.
"""

from __future__ import annotations

from typing import Any

from accelerate_megatron.models.expert_fields import top_k_problems
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.hf_config import required


def sigmoid_experts_problems(config: Any) -> list[str]:
    """Say what the engine cannot represent of such a config; empty when it can all."""
    name, num_layers = type(config).__name__, config.num_hidden_layers
    normalized, top_k = required(config, "norm_topk_prob"), required(config, "num_experts_per_tok")
    dense = required(config, "first_k_dense_replace")
    num_experts = required(config, "n_routed_experts")
    problems = top_k_problems(config, num_experts=num_experts, normalized=normalized)
    if not normalized and top_k != 1:
        problems.append(
            f"{name}.norm_topk_prob is False: Megatron-Core's sigmoid router always makes the "
            "weights of the chosen experts add up to 1; set norm_topk_prob to True."
        )
    problems += _group_problems(config)
    if required(config, "n_shared_experts") < 1:
        problems.append(
            f"{name}.n_shared_experts is {config.n_shared_experts}; it must be at least 1."
        )
    if not 0 <= dense < num_layers:
        problems.append(
            f"{name}.first_k_dense_replace is {dense}: of the {num_layers} layers one at least "
            f"must have experts; it can be 0 to {num_layers - 1}."
        )
    return problems


def _group_problems(config: Any) -> list[str]:
    """Refuse limits on groups of experts that the engine's router reads otherwise.

    transformers chooses groups by the sum of their two best experts, Megatron-Core by that of
    their num_experts_per_tok / topk_group best ones.

    Source: megatron-core 0.16.1, transformer/moe/moe_utils.py, group_limited_topk.
    """
    name = type(config).__name__
    groups, chosen = required(config, "n_group"), required(config, "topk_group")
    num_experts, top_k = required(config, "n_routed_experts"), config.num_experts_per_tok
    if groups == 1:
        return []
    problems = []
    if num_experts % groups or not 1 <= chosen <= groups:
        problems.append(
            f"{name}.n_group is {groups} and topk_group is {chosen}: n_group must divide the "
            f"{num_experts} experts, and topk_group must be from 1 to n_group."
        )
    elif top_k // chosen != 2:
        problems.append(
            f"{name}.num_experts_per_tok is {top_k} and topk_group is {chosen}: with groups of "
            "experts, Megatron-Core's router agrees with transformers' only where "
            "num_experts_per_tok is twice topk_group."
        )
    return problems


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
