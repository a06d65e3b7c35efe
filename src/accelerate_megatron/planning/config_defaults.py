"""What transformers takes for fields that a config.json leaves out, by model type. No torch.

Older files leave out what was added later, such as `layer_types`, and files of any age may leave
out what is as in their class.

Source: transformers 5.24, models/*/configuration_*.py.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "architectures": None,
}
_DECODER: dict[str, Any] = {
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}
_BALANCED: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_SPARSE: dict[str, Any] = {
    **_BALANCED,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
_WINDOWED: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_ENCODER: dict[str, Any] = {
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "is_decoder": False,
    "problem_type": None,
}
_ENCODER_DECODER: dict[str, Any] = {
    "is_encoder_decoder": True,
    "d_model": 512,
    "d_kv": 64,
    "num_decoder_layers": None,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "initializer_factor": 1.0,
    "pad_token_id": 0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    },
    "llama": {**_DECODER, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    "mistral": {**_DECODER, "sliding_window": 4096},
    "mixtral": {
        **_DECODER,
        **_BALANCED,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "router_jitter_noise": 0.0,
        "rope_theta": 1e6,
    },
    "qwen2": {**_DECODER, **_WINDOWED},
    "qwen3": {**_DECODER, **_WINDOWED, "attention_bias": False, "head_dim": 128},
    "phi3": {
        **_DECODER,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "partial_rotary_factor": 1.0,
    },
    "stablelm": {
        **_DECODER,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "hidden_dropout": 0.0,
        "partial_rotary_factor": 0.25,
    },
    "starcoder2": {
        **_DECODER,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "initializer_range": 0.018042,
        "sliding_window": None,
        "use_bias": True,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "qwen2_moe": {
        **_DECODER,
        **_SPARSE,
        "max_window_layers": 28,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
    },
    "qwen3_moe": {**_DECODER, **_SPARSE, "attention_bias": False, "num_experts_per_tok": 8},
    "deepseek_v3": {
        **_DECODER,
        "attention_bias": False,
        "output_router_logits": False,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
    },
    "glm4_moe": {
        **_DECODER,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "output_router_logits": False,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 8,
        "partial_rotary_factor": 0.5,
    },
    "bert": {
        **_ENCODER,
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "megatron-bert": {
        **_ENCODER,
        "vocab_size": 29056,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "t5": {
        **_ENCODER_DECODER,
        "vocab_size": 32128,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "feed_forward_proj": "relu",
    },
    "mt5": {
        **_ENCODER_DECODER,
        "vocab_size": 250112,
        "d_ff": 1024,
        "num_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
    },
}


def derived_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that follow from others where a file does not say them itself.

    Args:
        values: Fields of the file, and the defaults of those that it leaves out.
    """
    kind = values["model_type"]
    if "feed_forward_proj" in DEFAULTS.get(kind, {}):
        return _of_two_stacks(values)
    if "use_sliding_window" not in DEFAULTS.get(kind, {}):
        return {}
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if kind == "qwen3_moe" or values.get("layer_types") is not None:
        return {"sliding_window": window}
    first = values["max_window_layers"]
    types = [
        "sliding_attention"
        if window is not None and _has_window(kind, layer, first)
        else "full_attention"
        for layer in range(values.get("num_hidden_layers", 0))
    ]
    return {"sliding_window": window, "layer_types": types}


def _of_two_stacks(values: dict[str, Any]) -> dict[str, Any]:
    """Return what T5's and mT5's config classes make of the fields of their files."""
    gate, _, name = values["feed_forward_proj"].rpartition("-")
    depth = values["num_decoder_layers"]
    return {
        "num_decoder_layers": values["num_layers"] if depth is None else depth,
        "is_gated_act": gate == "gated",
        "dense_act_fn": "gelu_new" if (gate, name) == ("gated", "gelu") else name,
        # Files of transformers 4 say of v1.1 that its output layer is not tied.
        "scale_decoder_outputs": values.get(
            "scale_decoder_outputs", values["tie_word_embeddings"] is not False
        ),
    }


def _has_window(kind: str, layer: int, max_window_layers: int) -> bool:
    """Say whether a layer, from 0, has the window of a model that uses one."""
    if kind == "qwen2_moe":  # as transformers has it: every other one of the first layers
        return layer % 2 == 0 and layer < max_window_layers
    return layer >= max_window_layers
