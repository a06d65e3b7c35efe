"""StarCoder2: rotary positions, LayerNorm, an ungated MLP, biases, an optional window.

Source: transformers 5.24, models/starcoder2/modeling_starcoder2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models.decoder_fields import (
    decoder_fields,
    decoder_problems,
    one_window,
    window_problems,
)
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Direct, Parameter
from accelerate_megatron.models.shape import ModelShape

_MLP: dict[str, Parameter] = {
    f"{rows.LAYER}.mlp.linear_fc1.layer_norm_weight": Direct(
        f"{rows.HF}.post_attention_layernorm.weight"
    ),
    f"{rows.LAYER}.mlp.linear_fc1.weight": Direct(f"{rows.HF}.mlp.c_fc.weight"),
    f"{rows.LAYER}.mlp.linear_fc2.weight": Direct(f"{rows.HF}.mlp.c_proj.weight"),
}
_MLP_BIASES: dict[str, Parameter] = {
    f"{rows.LAYER}.mlp.linear_fc1.bias": Direct(f"{rows.HF}.mlp.c_fc.bias"),
    f"{rows.LAYER}.mlp.linear_fc2.bias": Direct(f"{rows.HF}.mlp.c_proj.bias"),
}


def starcoder2_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a StarCoder2; its norms have biases also without `use_bias`."""
    biases = {**rows.QKV_BIAS, **rows.OUTPUT_BIAS, **_MLP_BIASES}
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **_MLP,
        **rows.NORM_BIASES,
        **(biases if shape.linear_bias else {}),
        **rows.FINAL_NORM,
        **rows.FINAL_NORM_BIAS,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def starcoder2_shape(config: Any) -> ModelShape:
    """Translate a `Starcoder2Config`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse([*decoder_problems(config), *window_problems(config)])
    use_bias = required(config, "use_bias")
    return ModelShape(
        **decoder_fields(config),
        model_type="starcoder2",
        normalization="LayerNorm",
        norm_epsilon=required(config, "norm_epsilon"),
        gated_mlp=False,
        linear_bias=use_bias,
        qkv_bias=use_bias,
        attention_output_bias=use_bias,
        attention_windows=one_window(config),
        embedding_dropout=required(config, "embedding_dropout"),
        hidden_dropout=required(config, "residual_dropout"),
    )


STARCODER2 = Family(
    model_type="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    shape=starcoder2_shape,
    parameters=starcoder2_parameters,
)
