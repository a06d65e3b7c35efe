"""Qwen2: a Llama with biases on queries, keys and values, and windows in its later layers.

Source: transformers 5.24, models/qwen2/modeling_qwen2.py and configuration_qwen2.py.
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


def qwen2_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Qwen2."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **rows.QKV_BIAS,
        **rows.GATED_MLP,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def qwen2_shape(config: Any) -> ModelShape:
    """Translate a `Qwen2Config`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse([*decoder_problems(config), *window_problems(config)])
    return ModelShape(
        **decoder_fields(config),
        model_type="qwen2",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=True,
        attention_output_bias=False,
        attention_windows=windows_by_layer(config),
    )


QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    shape=qwen2_shape,
    parameters=qwen2_parameters,
    disk_extras=rows.OLD_ROTARY_BUFFERS,
)
