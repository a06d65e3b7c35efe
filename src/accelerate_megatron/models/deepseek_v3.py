"""DeepSeek-V3: multi-latent attention, and experts behind a group-limited sigmoid router.

The first layers are dense. Its layers for predicting further tokens
(`num_nextn_predict_layers`) are not part of transformers' model and are passed over, as
transformers does.

Source: transformers 5.24, models/deepseek_v3/modeling_deepseek_v3.py and
    configuration_deepseek_v3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models import expert_rows
from accelerate_megatron.models.decoder_fields import decoder_fields, decoder_problems
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import field, refuse, required, switch_problems
from accelerate_megatron.models.latent import LatentAttention
from accelerate_megatron.models.parameters import Direct, Parameter
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.models.sigmoid_experts import (
    sigmoid_experts,
    sigmoid_experts_problems,
)
from accelerate_megatron.models.yarn import yarn_attention_factor, yarn_magnitude

_NEXT_TOKEN_LAYER = (r"model\.layers\.61\..*",)
"""The layer after the last one of the published models, in their folders only."""
_ATTENTION = f"{rows.LAYER}.self_attention"
_HF_ATTENTION = f"{rows.HF}.self_attn"
_LATENTS: rows.Rows = {
    f"{rows.LAYER}.input_layernorm.weight": Direct(f"{rows.HF}.input_layernorm.weight"),
    f"{_ATTENTION}.linear_kv_down_proj.weight": Direct(
        f"{_HF_ATTENTION}.kv_a_proj_with_mqa.weight"
    ),
    f"{_ATTENTION}.kv_layernorm.weight": Direct(f"{_HF_ATTENTION}.kv_a_layernorm.weight"),
    f"{_ATTENTION}.linear_kv_up_proj.weight": Direct(f"{_HF_ATTENTION}.kv_b_proj.weight"),
    f"{_ATTENTION}.linear_proj.weight": Direct(f"{_HF_ATTENTION}.o_proj.weight"),
}
_QUERY: rows.Rows = {
    f"{_ATTENTION}.linear_q_proj.weight": Direct(f"{_HF_ATTENTION}.q_proj.weight"),
}
_QUERY_LATENT: rows.Rows = {
    f"{_ATTENTION}.linear_q_down_proj.weight": Direct(f"{_HF_ATTENTION}.q_a_proj.weight"),
    f"{_ATTENTION}.q_layernorm.weight": Direct(f"{_HF_ATTENTION}.q_a_layernorm.weight"),
    f"{_ATTENTION}.linear_q_up_proj.weight": Direct(f"{_HF_ATTENTION}.q_b_proj.weight"),
}


def deepseek_v3_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a DeepSeek-V3 in memory."""
    has_query_latent = shape.latent is not None and shape.latent.query_rank is not None
    return {
        **rows.EMBEDDING,
        **_LATENTS,
        **(_QUERY_LATENT if has_query_latent else _QUERY),
        **(rows.GATED_MLP if shape.has_dense_layers else {}),
        **expert_rows.SIGMOID,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def deepseek_v3_shape(config: Any) -> ModelShape:
    """Translate a `DeepseekV3Config`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse(
        [
            *decoder_problems(config, more_rope_types=("yarn",)),
            *_attention_problems(config),
            *sigmoid_experts_problems(config),
        ]
    )
    latent = _latent(config)
    fields = decoder_fields(config)
    return ModelShape(
        # What the engine calls a head's channels are those of its values.
        **{**fields, "kv_channels": required(config, "v_head_dim")},
        model_type="deepseek_v3",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=False,
        attention_output_bias=False,
        rotary_channels=latent.position_channels,
        softmax_scale=_softmax_scale(fields["rope_parameters"], latent),
        latent=latent,
        experts=sigmoid_experts(config),
    )


def _latent(config: Any) -> LatentAttention:
    rope = required(config, "rope_parameters")
    return LatentAttention(
        query_rank=field(config, "q_lora_rank"),
        key_value_rank=required(config, "kv_lora_rank"),
        content_channels=required(config, "qk_nope_head_dim"),
        position_channels=required(config, "qk_rope_head_dim"),
        interleaved=bool(field(config, "rope_interleave")),
        position_scale=yarn_attention_factor(rope) if rope["rope_type"] == "yarn" else 1.0,
    )


def _softmax_scale(rope: Mapping[str, Any], latent: LatentAttention) -> float:
    scale = float(latent.key_channels**-0.5)
    weight = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    return scale * yarn_magnitude(rope["factor"], weight) ** 2 if weight else scale


def _attention_problems(config: Any) -> list[str]:
    name = type(config).__name__
    problems = switch_problems(
        config,
        "attention_bias",
        reason="the low-rank projections here have no biases; set it to False.",
    )
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads != groups:
        problems.append(
            f"{name}.num_key_value_heads is {groups}: with latent attention every head has its "
            f"own keys and values; set it to num_attention_heads, {heads}."
        )
    return problems


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    shape=deepseek_v3_shape,
    parameters=deepseek_v3_parameters,
    disk_rows=expert_rows.SEPARATE,
    disk_extras=_NEXT_TOKEN_LAYER,
)
