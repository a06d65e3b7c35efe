"""Qwen2-MoE: a Qwen2 with experts, and one shared expert whose output is gated.

Source: transformers 5.24, models/qwen2_moe/modeling_qwen2_moe.py and configuration_qwen2_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models import expert_rows
from accelerate_megatron.models.decoder_fields import (
    SLIDING,
    decoder_fields,
    decoder_problems,
    window_problems,
    windows_by_layer,
)
from accelerate_megatron.models.decoder_rows import HF, LAYER
from accelerate_megatron.models.expert_fields import (
    balance_coefficient_of,
    sparse_dense_layers,
    sparse_problems,
    top_k_problems,
)
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Direct, Parameter
from accelerate_megatron.models.shape import ModelShape

_SHARED_EXPERT: rows.Rows = {
    **expert_rows.shared_rows("shared_expert"),
    f"{LAYER}.mlp.shared_experts.gate_weight": Direct(f"{HF}.mlp.shared_expert_gate.weight"),
}


def qwen2_moe_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Qwen2-MoE in memory."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **(rows.QKV_BIAS if shape.qkv_bias else {}),
        **(rows.GATED_MLP if shape.has_dense_layers else {}),
        **expert_rows.NORM,
        **expert_rows.ROUTER,
        **expert_rows.STACKED,
        **_SHARED_EXPERT,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def qwen2_moe_shape(config: Any) -> ModelShape:
    """Translate a `Qwen2MoeConfig`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    num_experts, normalized = required(config, "num_experts"), required(config, "norm_topk_prob")
    refuse(
        [
            *decoder_problems(config),
            # Without windows, transformers sets sliding_window to 0.
            *(window_problems(config) if SLIDING in required(config, "layer_types") else []),
            *sparse_problems(config),
            *top_k_problems(config, num_experts=num_experts, normalized=normalized),
        ]
    )
    return ModelShape(
        **decoder_fields(config),
        model_type="qwen2_moe",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=required(config, "qkv_bias"),
        attention_output_bias=False,
        attention_windows=windows_by_layer(config),
        experts=Experts(
            num_experts=num_experts,
            top_k=required(config, "num_experts_per_tok"),
            ffn_hidden_size=required(config, "moe_intermediate_size"),
            normalize_top_k=normalized,
            shared_ffn_hidden_size=required(config, "shared_expert_intermediate_size"),
            shared_gate=True,
            dense_layers=sparse_dense_layers(config),
            balance_coefficient=balance_coefficient_of(config),
        ),
    )


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    shape=qwen2_moe_shape,
    parameters=qwen2_moe_parameters,
    disk_rows=expert_rows.SEPARATE,
)
