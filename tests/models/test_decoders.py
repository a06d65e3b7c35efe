"""Llama's kin, from Mistral to StarCoder2: what their configs become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.registry import FAMILIES, family_of
from accelerate_megatron.models.shape import ModelShape

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.01,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE = {
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 99,
    "max_positions": 32,
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "linear_bias": False,
    "qkv_bias": False,
    "attention_output_bias": False,
    "position_embedding": "rope",
    "rope_parameters": ROPE,
    "tied_embeddings": False,
    "attention_dropout": 0.1,
    "initializer_range": 0.01,
}


def shape_of(config: PreTrainedConfig) -> ModelShape:
    return family_of(config).shape(config)


def changed(config: PreTrainedConfig, **settings: Any) -> PreTrainedConfig:
    """A config that may hold what transformers' own checks refuse."""
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "differences"),
    [
        pytest.param(
            MistralConfig(**SIZES, rms_norm_eps=1e-5, sliding_window=7, head_dim=24),
            {"norm_epsilon": 1e-5, "kv_channels": 24, "attention_windows": (7, 7, 7)},
            id="mistral",
        ),
        pytest.param(
            MistralConfig(**SIZES, sliding_window=None), {"norm_epsilon": 1e-6}, id="mistral-full"
        ),
        pytest.param(
            Qwen2Config(**SIZES, tie_word_embeddings=True),
            {"norm_epsilon": 1e-6, "qkv_bias": True, "tied_embeddings": True},
            id="qwen2",
        ),
        pytest.param(
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
            {"norm_epsilon": 1e-6, "qkv_bias": True, "attention_windows": (None, 5, 5)},
            id="qwen2-windows",
        ),
        pytest.param(
            Qwen3Config(**SIZES, attention_bias=True),
            {
                "norm_epsilon": 1e-6,
                "kv_channels": 128,
                "qk_norm": True,
                "qkv_bias": True,
                "attention_output_bias": True,
            },
            id="qwen3",
        ),
        pytest.param(
            Phi3Config(
                **SIZES,
                resid_pdrop=0.2,
                embd_pdrop=0.3,
                sliding_window=4,
                rope_parameters={**ROPE, "partial_rotary_factor": 0.75},
            ),
            {
                "norm_epsilon": 1e-5,
                "hidden_dropout": 0.2,
                "rotary_channels": 12,
                "rope_parameters": {**ROPE, "partial_rotary_factor": 0.75},
                "attention_windows": (4, 4, 4),
            },
            id="phi3",
        ),
        pytest.param(
            StableLmConfig(
                **SIZES, layer_norm_eps=1e-4, use_qkv_bias=True, rope_parameters=dict(ROPE)
            ),
            {
                "norm_epsilon": 1e-4,
                "normalization": "LayerNorm",
                "qkv_bias": True,
                "rotary_channels": 4,
                "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
            },
            id="stablelm",
        ),
        pytest.param(
            Starcoder2Config(
                **SIZES, residual_dropout=0.2, embedding_dropout=0.3, tie_word_embeddings=False
            ),
            {
                "norm_epsilon": 1e-5,
                "normalization": "LayerNorm",
                "activation": "gelu_tanh",
                "gated_mlp": False,
                "linear_bias": True,
                "qkv_bias": True,
                "attention_output_bias": True,
                "hidden_dropout": 0.2,
                "embedding_dropout": 0.3,
            },
            id="starcoder2",
        ),
    ],
)
def test_every_field_of_the_shape_comes_from_the_config(config, differences) -> None:
    expected = {**SHAPE, "model_type": config.model_type, **differences}

    assert shape_of(config) == ModelShape(**expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            changed(MistralConfig(**SIZES), layer_types=["full_attention"] * 3),
            r"MistralConfig\.layer_types is .* with sliding_window 4096: transformers' Mistral",
            id="mistral-layer-types",
        ),
        pytest.param(
            changed(MistralConfig(**SIZES), sliding_window=0),
            r"MistralConfig\.sliding_window is 0; it must be at least 1",
            id="window-0",
        ),
        pytest.param(
            changed(Qwen2Config(**SIZES), layer_types=["full_attention", "chunked_attention", "x"]),
            r"Qwen2Config\.layer_types has chunked_attention, x; supported are full_attention and",
            id="unknown-layer-types",
        ),
        pytest.param(
            changed(Qwen3Config(**SIZES), layer_types=["full_attention"] * 2),
            r"Qwen3Config\.layer_types names 2 layers and num_hidden_layers is 3",
            id="too-few-layer-types",
        ),
        pytest.param(
            changed(Qwen3Config(**SIZES), layer_types=["sliding_attention"] * 3),
            r"Qwen3Config\.layer_types has sliding_attention, but sliding_window is None",
            id="no-window",
        ),
        pytest.param(
            changed(Phi3Config(**SIZES), rope_parameters={**ROPE, "rope_type": "longrope"}),
            r"Phi3Config\.rope_parameters has rope_type 'longrope'; supported are default",
            id="longrope",
        ),
        pytest.param(
            changed(Phi3Config(**SIZES), rope_parameters={**ROPE, "partial_rotary_factor": 0.2}),
            r"Phi3Config turns 3 channels of each head: .*must be even",
            id="odd-channels",
        ),
        pytest.param(
            changed(Qwen2Config(**SIZES), rope_parameters={**ROPE, "partial_rotary_factor": 0.5}),
            r"partial_rotary_factor 0\.5: a qwen2 model turns all channels",
            id="qwen2-partial",
        ),
        pytest.param(
            StableLmConfig(**SIZES, use_parallel_residual=True),
            r"StableLmConfig\.use_parallel_residual is True: here the MLP reads the result",
            id="parallel-residual",
        ),
        pytest.param(
            StableLmConfig(**SIZES, qk_layernorm=True),
            r"StableLmConfig\.qk_layernorm is True: each head has norm weights of its own",
            id="norm-per-head",
        ),
        pytest.param(
            StableLmConfig(**SIZES, hidden_dropout=0.1),
            r"StableLmConfig\.hidden_dropout is 0\.1: transformers drops the MLP's output only",
            id="dropout-of-the-mlp-only",
        ),
        pytest.param(
            changed(Starcoder2Config(**SIZES), hidden_act="relu6"),
            r"Starcoder2Config\.hidden_act is 'relu6'",
            id="activation",
        ),
        pytest.param(
            changed(Starcoder2Config(**SIZES), num_key_value_heads=3),
            r"num_attention_heads is 4 and num_key_value_heads is 3: the heads must be a multiple",
            id="groups",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(config, message) -> None:
    with pytest.raises(UnsupportedError, match=message):
        shape_of(config)


@pytest.mark.parametrize("name", ["mistral", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2"])
def test_the_table_names_the_head_only_when_it_is_not_the_embedding(name: str) -> None:
    family = FAMILIES[name]
    shapes = {tied: family.shape(_config(name, tie_word_embeddings=tied)) for tied in (True, False)}

    assert "output_layer.weight" not in family.parameters(shapes[True])
    assert "output_layer.weight" in family.parameters(shapes[False])


def _config(name: str, **settings: Any) -> PreTrainedConfig:
    classes = (
        MistralConfig,
        Phi3Config,
        Qwen2Config,
        Qwen3Config,
        StableLmConfig,
        Starcoder2Config,
    )
    by_type = {cls.model_type: cls for cls in classes}
    return by_type[name](**SIZES, **settings)
