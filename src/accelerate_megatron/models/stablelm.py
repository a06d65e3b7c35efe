"""StableLM: a Llama with LayerNorm, rotary positions on a part of each head, optional qkv biases.

Source: transformers 5.24, models/stablelm/modeling_stablelm.py and configuration_stablelm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models.decoder_fields import (
    decoder_fields,
    decoder_problems,
    head_dim_of,
)
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required, switch_problems
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.rotary import rotary_channels_of
from accelerate_megatron.models.shape import ModelShape


def stablelm_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a StableLM; its norms have biases whatever the config says."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **(rows.QKV_BIAS if shape.qkv_bias else {}),
        **rows.GATED_MLP,
        **rows.NORM_BIASES,
        **rows.FINAL_NORM,
        **rows.FINAL_NORM_BIAS,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def stablelm_shape(config: Any) -> ModelShape:
    """Translate a `StableLmConfig`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse([*decoder_problems(config, partial_rotary=True), *_layer_problems(config)])
    return ModelShape(
        **decoder_fields(config),
        model_type="stablelm",
        normalization="LayerNorm",
        norm_epsilon=required(config, "layer_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=required(config, "use_qkv_bias"),
        attention_output_bias=False,
        rotary_channels=rotary_channels_of(config, head_dim_of(config)),
    )


def _layer_problems(config: Any) -> list[str]:
    """Say what the engine's layers cannot do of a StableLM's; empty when they can all."""
    problems = [
        *switch_problems(
            config,
            "use_parallel_residual",
            reason="here the MLP reads the result of attention, never its input; take a StableLM "
            "without it.",
        ),
        *switch_problems(
            config,
            "qk_layernorm",
            reason="each head has norm weights of its own, and here the heads share theirs; take a "
            "StableLM without it.",
        ),
    ]
    dropout = required(config, "hidden_dropout")
    if dropout > 0:
        problems.append(
            f"{type(config).__name__}.hidden_dropout is {dropout}: transformers drops the MLP's "
            "output only, Megatron-Core the attention's too; set hidden_dropout to 0.0."
        )
    return problems


STABLELM = Family(
    model_type="stablelm",
    architectures=("StableLmForCausalLM",),
    shape=stablelm_shape,
    parameters=stablelm_parameters,
)
