"""Qwen3-MoE: a Qwen3 whose MLPs are mixtures of experts, in all layers or in some.

Source: transformers 5.24, models/qwen3_moe/modeling_qwen3_moe.py and configuration_qwen3_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models import expert_rows
from accelerate_megatron.models.decoder_fields import (
    decoder_fields,
    decoder_problems,
    one_window,
    window_problems,
)
from accelerate_megatron.models.expert_fields import (
    balance_coefficient_of,
    sparse_dense_layers,
    sparse_problems,
    top_k_problems,
)
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape


def qwen3_moe_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Qwen3-MoE in memory."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **rows.QK_NORM,
        **(rows.QKV_BIAS if shape.qkv_bias else {}),
        **(rows.OUTPUT_BIAS if shape.attention_output_bias else {}),
        **(rows.GATED_MLP if shape.has_dense_layers else {}),
        **expert_rows.NORM,
        **expert_rows.ROUTER,
        **expert_rows.STACKED,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def qwen3_moe_shape(config: Any) -> ModelShape:
    """Translate a `Qwen3MoeConfig`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    num_experts, normalized = required(config, "num_experts"), required(config, "norm_topk_prob")
    refuse(
        [
            *decoder_problems(config),
            *window_problems(config),
            *sparse_problems(config),
            *top_k_problems(config, num_experts=num_experts, normalized=normalized),
        ]
    )
    attention_bias = required(config, "attention_bias")
    return ModelShape(
        **decoder_fields(config),
        model_type="qwen3_moe",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        qk_norm=True,
        attention_windows=one_window(config),
        experts=Experts(
            num_experts=num_experts,
            top_k=required(config, "num_experts_per_tok"),
            ffn_hidden_size=required(config, "moe_intermediate_size"),
            normalize_top_k=normalized,
            dense_layers=sparse_dense_layers(config),
            balance_coefficient=balance_coefficient_of(config),
        ),
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    shape=qwen3_moe_shape,
    parameters=qwen3_moe_parameters,
    disk_rows=expert_rows.SEPARATE,
)
