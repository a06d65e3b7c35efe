"""Phi-3: fused projections, positions on part of each head, an optional window.

Phi-3 stacks all queries, all keys and all values in one tensor, and gate above up in another;
the second is Megatron's own layout.

Source: transformers 5.24, models/phi3/modeling_phi3.py and configuration_phi3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import decoder_rows as rows
from accelerate_megatron.models.decoder_fields import (
    decoder_fields,
    decoder_problems,
    head_dim_of,
    one_window,
    window_problems,
)
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import Direct, Parameter, StackedQKV
from accelerate_megatron.models.rotary import rotary_channels_of
from accelerate_megatron.models.shape import ModelShape

_FUSED: dict[str, Parameter] = {
    **rows.ATTENTION,
    f"{rows.LAYER}.self_attention.linear_qkv.weight": StackedQKV(
        f"{rows.HF}.self_attn.qkv_proj.weight"
    ),
    **rows.GATED_MLP,
    f"{rows.LAYER}.mlp.linear_fc1.weight": Direct(f"{rows.HF}.mlp.gate_up_proj.weight"),
}


def phi3_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Phi-3."""
    return {
        **rows.EMBEDDING,
        **_FUSED,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def phi3_shape(config: Any) -> ModelShape:
    """Translate a `Phi3Config`.

    `embd_pdrop` has no effect in transformers, and has none here.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent; longrope is one.
        ConfigurationError: A field is missing.
    """
    refuse([*decoder_problems(config, partial_rotary=True), *window_problems(config)])
    return ModelShape(
        **decoder_fields(config),
        model_type="phi3",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=False,
        attention_output_bias=False,
        rotary_channels=rotary_channels_of(config, head_dim_of(config)),
        attention_windows=one_window(config),
        hidden_dropout=required(config, "resid_pdrop"),
    )


PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    shape=phi3_shape,
    parameters=phi3_parameters,
)
