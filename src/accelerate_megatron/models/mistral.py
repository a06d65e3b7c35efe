"""Mistral: a Llama without biases whose tokens look at the last `sliding_window` ones only.

Source: transformers 5.24, models/mistral/modeling_mistral.py, and masking_utils.py for what a
window of w means: w tokens, the current one included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models.decoder_fields import (
    SLIDING,
    decoder_fields,
    decoder_problems,
    one_window,
    window_problems,
)
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape


def mistral_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Mistral."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **rows.GATED_MLP,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def mistral_shape(config: Any) -> ModelShape:
    """Translate a `MistralConfig`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse([*decoder_problems(config), *window_problems(config), *_layer_type_problems(config)])
    return ModelShape(
        **decoder_fields(config),
        model_type="mistral",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=False,
        attention_output_bias=False,
        attention_windows=one_window(config),
    )


def _layer_type_problems(config: Any) -> list[str]:
    """Refuse windows that differ by layer: transformers' Mistral passes over `layer_types`."""
    types = getattr(config, "layer_types", None)
    if types is None or all(
        (kind == SLIDING) == (config.sliding_window is not None) for kind in types
    ):
        return []
    return [
        f"MistralConfig.layer_types is {list(types)} with sliding_window {config.sliding_window}: "
        "transformers' Mistral does not read layer_types and gives every layer the window. "
        "Take layer_types out, or set sliding_window to None for full attention everywhere."
    ]


MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    shape=mistral_shape,
    parameters=mistral_parameters,
    disk_extras=rows.OLD_ROTARY_BUFFERS,
)
