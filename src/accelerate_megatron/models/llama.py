"""Llama: grouped queries, a gated MLP, RMSNorm, rotary positions with their scaling.

Source: transformers 5.24, models/llama/modeling_llama.py and modeling_rope_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models.decoder_fields import (
    decoder_fields,
    decoder_problems,
)
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape


def llama_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Llama, with its biases and its untied head where it has them."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **rows.GATED_MLP,
        **(rows.QKV_BIAS if shape.qkv_bias else {}),
        **(rows.OUTPUT_BIAS if shape.attention_output_bias else {}),
        **(rows.GATED_MLP_BIAS if shape.linear_bias else {}),
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def llama_shape(config: Any) -> ModelShape:
    """Translate a `LlamaConfig`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse(decoder_problems(config))
    attention_bias = required(config, "attention_bias")
    return ModelShape(
        **decoder_fields(config),
        model_type="llama",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=required(config, "mlp_bias"),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
    )


LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    shape=llama_shape,
    parameters=llama_parameters,
    disk_extras=rows.OLD_ROTARY_BUFFERS,
)
