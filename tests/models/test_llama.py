from __future__ import annotations

import pytest
from transformers import LlamaConfig

from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.llama import llama_parameters, llama_shape
from accelerate_megatron.models.shape import ModelShape

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _config(**settings):
    """A config that may hold what transformers' own checks refuse."""
    config = LlamaConfig()
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config


def test_every_field_of_the_shape_comes_from_the_config():
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="gelu",
        max_position_embeddings=32,
        initializer_range=0.01,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_dropout=0.1,
        mlp_bias=True,
        head_dim=24,
        rope_parameters=dict(LLAMA3_ROPE),
    )

    assert llama_shape(config) == ModelShape(
        model_type="llama",
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
        activation="gelu",
        gated_mlp=True,
        linear_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        position_embedding="rope",
        rope_parameters=LLAMA3_ROPE,
        tied_embeddings=True,
        attention_dropout=0.1,
        initializer_range=0.01,
    )


def test_head_dim_and_key_value_heads_default_as_in_transformers():
    shape = llama_shape(LlamaConfig(hidden_size=64, num_attention_heads=4))

    assert shape.kv_channels == 16
    assert shape.num_query_groups == 4


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_type": "default", "rope_theta": 10000.0}, id="default"),
        pytest.param({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, id="linear"),
        pytest.param(LLAMA3_ROPE, id="llama3"),
    ],
)
def test_each_supported_rope_is_taken_whole(rope):
    config = LlamaConfig(max_position_embeddings=32, rope_parameters=dict(rope))

    assert llama_shape(config).rope_parameters == rope


def test_the_shape_does_not_share_its_rope_with_the_config():
    config = LlamaConfig()
    shape = llama_shape(config)

    config.rope_parameters["rope_theta"] = 7.0

    assert shape.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"hidden_act": "relu6"},
            r"LlamaConfig\.hidden_act is 'relu6'; supported are gelu",
            id="activation",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            r"rope_parameters has rope_type 'yarn'; supported are default, linear, llama3",
            id="rope-type",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            r"rope_parameters lacks low_freq_factor, high_freq_factor, original_max_position_emb",
            id="rope-incomplete",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            r"rope_parameters has partial_rotary_factor 0\.5: a llama model turns all",
            id="partial-rotary",
        ),
        pytest.param(
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            r"num_attention_heads is 6 and num_key_value_heads is 4: the heads must be a multiple",
            id="groups",
        ),
        pytest.param({"head_dim": 15}, r"LlamaConfig turns 15 channels .*must be even", id="odd"),
        pytest.param(
            {"quantization_config": {"bits": 4}},
            r"LlamaConfig\.quantization_config is set",
            id="quantised",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        llama_shape(_config(**settings))


def test_a_config_without_rope_parameters_is_an_error():
    with pytest.raises(ConfigurationError, match=r"LlamaConfig\.rope_parameters is None"):
        llama_shape(_config(rope_parameters=None))


def test_biases_and_an_untied_head_are_parameters_only_where_the_config_has_them():
    plain = llama_parameters(llama_shape(_config(tie_word_embeddings=True)))
    full = llama_parameters(llama_shape(_config(attention_bias=True, mlp_bias=True)))

    assert not [name for name in plain if name.endswith("bias") or name == "output_layer.weight"]
    assert full.keys() - plain.keys() == {
        "decoder.layers.{layer}.self_attention.linear_qkv.bias",
        "decoder.layers.{layer}.self_attention.linear_proj.bias",
        "decoder.layers.{layer}.mlp.linear_fc1.bias",
        "decoder.layers.{layer}.mlp.linear_fc2.bias",
        "output_layer.weight",
    }


def test_attention_and_mlp_have_a_switch_each_for_their_biases():
    attention = llama_parameters(llama_shape(_config(attention_bias=True)))
    mlp = llama_parameters(llama_shape(_config(mlp_bias=True)))

    assert {name.split(".")[3] for name in attention if name.endswith("bias")} == {"self_attention"}
    assert {name.split(".")[3] for name in mlp if name.endswith("bias")} == {"mlp"}
