"""Mixtral: a Mistral whose MLPs are mixtures of experts.

Source: transformers 5.24, models/mixtral/modeling_mixtral.py, and conversion_mapping.py for the
names on disk.
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
from accelerate_megatron.models.decoder_rows import HF, LAYER
from accelerate_megatron.models.expert_fields import balance_coefficient_of, top_k_problems
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import refuse, required
from accelerate_megatron.models.parameters import (
    Direct,
    Parameter,
    SeparateExperts,
    SeparateGateUpExperts,
)
from accelerate_megatron.models.shape import ModelShape

_DISK = f"{HF}.block_sparse_moe"
_SEPARATE: rows.Rows = {
    f"{LAYER}.mlp.router.weight": Direct(f"{_DISK}.gate.weight"),
    f"{LAYER}.mlp.experts.experts.linear_fc1.weight": SeparateGateUpExperts(
        gate=f"{_DISK}.experts.{{expert}}.w1.weight", up=f"{_DISK}.experts.{{expert}}.w3.weight"
    ),
    f"{LAYER}.mlp.experts.experts.linear_fc2.weight": SeparateExperts(
        f"{_DISK}.experts.{{expert}}.w2.weight"
    ),
}


def mixtral_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Mixtral in memory."""
    return {
        **rows.EMBEDDING,
        **rows.ATTENTION,
        **expert_rows.NORM,
        **expert_rows.ROUTER,
        **expert_rows.STACKED,
        **rows.FINAL_NORM,
        **({} if shape.tied_embeddings else rows.UNTIED_HEAD),
    }


def mixtral_shape(config: Any) -> ModelShape:
    """Translate a `MixtralConfig`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    refuse(
        [
            *decoder_problems(config),
            *window_problems(config),
            *top_k_problems(
                config, num_experts=required(config, "num_local_experts"), normalized=True
            ),
            *_jitter_problems(config),
        ]
    )
    fields = decoder_fields(config)
    return ModelShape(
        **fields,
        model_type="mixtral",
        normalization="RMSNorm",
        norm_epsilon=required(config, "rms_norm_eps"),
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=False,
        attention_output_bias=False,
        attention_windows=one_window(config),
        experts=Experts(
            num_experts=required(config, "num_local_experts"),
            top_k=required(config, "num_experts_per_tok"),
            ffn_hidden_size=fields["ffn_hidden_size"],
            balance_coefficient=balance_coefficient_of(config),
        ),
    )


def _jitter_problems(config: Any) -> list[str]:
    noise = required(config, "router_jitter_noise")
    if noise == 0.0:
        return []
    return [
        f"MixtralConfig.router_jitter_noise is {noise}: transformers multiplies the input of "
        "router and experts by random numbers, Megatron-Core that of the router only; set "
        "router_jitter_noise to 0.0."
    ]


MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    shape=mixtral_shape,
    parameters=mixtral_parameters,
    disk_rows=_SEPARATE,
    disk_extras=rows.OLD_ROTARY_BUFFERS,
)
