"""What the configs of models with experts have in common, and what is refused. No torch here."""

from __future__ import annotations

from typing import Any

from accelerate_megatron.models.hf_config import required


def balance_coefficient_of(config: Any) -> float:
    """Return the factor of transformers' load-balancing loss; 0 where the config asks for none.

    transformers adds it to the loss only with `output_router_logits`.

    Source: transformers 5.24, models/mixtral/modeling_mixtral.py, MixtralForCausalLM.forward.
    """
    if not required(config, "output_router_logits"):
        return 0.0
    return float(required(config, "router_aux_loss_coef"))


def sparse_dense_layers(config: Any) -> tuple[int, ...]:
    """Return the layers without experts of a config with a sparse step and a list of exceptions.

    Source: transformers 5.24, models/qwen2_moe/modeling_qwen2_moe.py, Qwen2MoeDecoderLayer.
    """
    step = required(config, "decoder_sparse_step")
    exceptions = required(config, "mlp_only_layers")
    return tuple(
        layer
        for layer in range(required(config, "num_hidden_layers"))
        if layer in exceptions or (layer + 1) % step
    )


def sparse_problems(config: Any) -> list[str]:
    """Say why the layers with experts cannot be told from such a config; empty when they can."""
    name = type(config).__name__
    step = required(config, "decoder_sparse_step")
    if step < 1:
        return [f"{name}.decoder_sparse_step is {step}; it must be at least 1."]
    num_layers = required(config, "num_hidden_layers")
    if required(config, "num_experts") > 0 and len(sparse_dense_layers(config)) < num_layers:
        return []
    return [
        f"{name} gives none of its {num_layers} layers experts (num_experts {config.num_experts}, "
        f"decoder_sparse_step {step}, mlp_only_layers {list(config.mlp_only_layers)}); use the "
        "model type without experts."
    ]


def top_k_problems(config: Any, *, num_experts: int, normalized: bool) -> list[str]:
    """Refuse numbers of chosen experts that the engine's router cannot do.

    Args:
        config: A config with `num_experts_per_tok`.
        num_experts: Experts of a layer.
        normalized: Whether the weights of the chosen experts add up to 1.
    """
    name = type(config).__name__
    top_k = required(config, "num_experts_per_tok")
    if not 1 <= top_k <= num_experts:
        return [
            f"{name}.num_experts_per_tok is {top_k}; it must be from 1 to the model's "
            f"{num_experts} experts."
        ]
    if top_k == 1 and normalized:
        return [
            f"{name}.num_experts_per_tok is 1 and the weights of the chosen experts add up to 1: "
            "then every weight is 1, and the router never learns; set num_experts_per_tok to 2 "
            "or more."
        ]
    return []
