from __future__ import annotations

import pytest
from transformers import MixtralConfig

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.mixtral import mixtral_parameters, mixtral_shape
from accelerate_megatron.models.shape import ModelShape


def _config(**settings):
    fields = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return MixtralConfig(**(fields | settings))


def test_every_field_of_the_shape_comes_from_the_config():
    config = _config(sliding_window=7, attention_dropout=0.1, initializer_range=0.01)

    assert mixtral_shape(config) == ModelShape(
        model_type="mixtral",
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=24,
        vocab_size=99,
        max_positions=32,
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        activation="silu",
        gated_mlp=True,
        linear_bias=False,
        qkv_bias=False,
        attention_output_bias=False,
        position_embedding="rope",
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        attention_windows=(7, 7, 7),
        tied_embeddings=False,
        attention_dropout=0.1,
        initializer_range=0.01,
        experts=Experts(num_experts=4, top_k=2, ffn_hidden_size=96),
    )


def test_the_balancing_loss_counts_only_where_the_config_returns_router_logits():
    silent = _config(router_aux_loss_coef=0.02)
    asked = _config(router_aux_loss_coef=0.02, output_router_logits=True)

    assert mixtral_shape(silent).experts.balance_coefficient == 0.0
    assert mixtral_shape(asked).experts.balance_coefficient == 0.02


def test_no_layer_has_an_ordinary_mlp():
    shape = mixtral_shape(_config())

    assert not shape.has_dense_layers
    assert not [name for name in mixtral_parameters(shape) if ".mlp.linear_fc" in name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"router_jitter_noise": 0.1},
            r"MixtralConfig\.router_jitter_noise is 0\.1: .*set router_jitter_noise to 0\.0",
            id="jitter",
        ),
        pytest.param(
            {"num_experts_per_tok": 1},
            r"MixtralConfig\.num_experts_per_tok is 1 and the weights .*: .*never learns",
            id="top-1",
        ),
        pytest.param(
            {"num_experts_per_tok": 5},
            r"num_experts_per_tok is 5; it must be from 1 to the model's 4 experts",
            id="top-5-of-4",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        mixtral_shape(_config(**settings))
