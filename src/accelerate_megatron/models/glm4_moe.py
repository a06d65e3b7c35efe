"""GLM-4.5: experts behind a sigmoid router with a correction bias, and shared experts.

The first layers are dense, and rotary positions turn half of a head's channels. Its layers for
predicting further tokens (`num_nextn_predict_layers`) are not part of transformers' model and are
passed over, as transformers does.

Source: transformers 5.24, models/glm4_moe/modeling_glm4_moe.py and configuration_glm4_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models import expert_rows
from accelerate_megatron.models.decoder_fields import decoder_fields, decoder_problems
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.rotary import rotary_channels_of
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.models.sigmoid_experts import (
    sigmoid_experts,
    sigmoid_experts_problems,
)

_NEXT_TOKEN_LAYERS = (r"model\.layers\.(46|92)\..*",)
"""Layers after the last one of the published models, in their folders only."""


def glm4_moe_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a GLM-4.5 in memory."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **(rows.QK_NORM if shape.qk_norm else {}),
        **(rows.QKV_BIAS if shape.qkv_bias else {}),
        **(rows.GATED_MLP if shape.has_dense_layers else {}),
        **expert_rows.SIGMOID,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def glm4_moe_shape(config: Any) -> ModelShape:
    """Translate a `Glm4MoeConfig`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse(
        [
            *decoder_problems(config, partial_rotary=True),
            *sigmoid_experts_problems(config),
        ]
    )
    fields = decoder_fields(config)
    return ModelShape(
        **fields,
        model_type="glm4_moe",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=required(config, "attention_bias"),
        attention_output_bias=False,
        qk_norm=required(config, "use_qk_norm"),
        rotary_channels=rotary_channels_of(config, fields["kv_channels"]),
        experts=sigmoid_experts(config),
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    shape=glm4_moe_shape,
    parameters=glm4_moe_parameters,
    disk_rows=expert_rows.SEPARATE,
    disk_extras=_NEXT_TOKEN_LAYERS,
)
