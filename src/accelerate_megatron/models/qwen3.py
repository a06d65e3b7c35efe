"""Qwen3: a Llama that normalises each head's queries and keys; optional attention biases.

Source: transformers 5.24, models/qwen3/modeling_qwen3.py and configuration_qwen3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models.decoder_fields import (
    decoder_fields,
    decoder_problems,
    window_problems,
    windows_by_layer,
)
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape


def qwen3_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Qwen3."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **rows.QK_NORM,
        **(rows.QKV_BIAS if shape.qkv_bias else {}),
        **(rows.OUTPUT_BIAS if shape.attention_output_bias else {}),
        **rows.GATED_MLP,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def qwen3_shape(config: Any) -> ModelShape:
    """Translate a `Qwen3Config`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse([*decoder_problems(config), *window_problems(config)])
    attention_bias = required(config, "attention_bias")
    return ModelShape(
        **decoder_fields(config),
        model_type="qwen3",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        qk_norm=True,
        attention_windows=windows_by_layer(config),
    )


QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    shape=qwen3_shape,
    parameters=qwen3_parameters,
)
