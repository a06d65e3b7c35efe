from __future__ import annotations

import pytest
from transformers import GPT2Config

from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.gpt2 import gpt2_parameters, gpt2_shape
from accelerate_megatron.models.parameters import Vocabulary
from accelerate_megatron.models.shape import ModelShape


def _shape(**settings):
    return gpt2_shape(GPT2Config(**settings))


def test_every_field_of_the_shape_comes_from_the_config():
    config = GPT2Config(
        vocab_size=99,
        n_positions=32,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_inner=80,
        activation_function="relu",
        resid_pdrop=0.2,
        embd_pdrop=0.3,
        attn_pdrop=0.4,
        layer_norm_epsilon=1e-6,
        initializer_range=0.01,
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    )

    assert gpt2_shape(config) == ModelShape(
        model_type="gpt2",
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=80,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=99,
        max_positions=32,
        normalization="LayerNorm",
        norm_epsilon=1e-6,
        activation="relu",
        gated_mlp=False,
        linear_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        position_embedding="learned_absolute",
        tied_embeddings=False,
        softmax_scale=1.0,
        scale_attention_by_layer=True,
        embedding_dropout=0.3,
        hidden_dropout=0.2,
        attention_dropout=0.4,
        initializer_range=0.01,
    )


def test_the_defaults_of_gpt2_are_taken():
    shape = _shape()

    assert shape.ffn_hidden_size == 4 * 768
    assert shape.softmax_scale is None
    assert shape.scale_attention_by_layer is False
    assert shape.tied_embeddings is True
    assert shape.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", "relu"),
        ("silu", "silu"),
        ("swish", "silu"),
    ],
)
def test_activations_are_those_of_transformers(name, expected):
    assert _shape(activation_function=name).activation == expected


def test_upcast_attention_changes_nothing_but_precision():
    assert _shape(reorder_and_upcast_attn=True) == _shape()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"activation_function": "quick_gelu"},
            r"GPT2Config\.activation_function is 'quick_gelu'; supported are gelu, gelu_fast",
            id="activation",
        ),
        pytest.param(
            {"add_cross_attention": True},
            r"GPT2Config\.add_cross_attention is True: the engine builds self-attention only",
            id="cross-attention",
        ),
        pytest.param(
            {"is_encoder_decoder": True},
            r"GPT2Config\.is_encoder_decoder is True: only decoder-only models",
            id="encoder-decoder",
        ),
        pytest.param(
            {"quantization_config": {"bits": 4}},
            r"GPT2Config\.quantization_config is set: quantised weights cannot be trained",
            id="quantised",
        ),
        pytest.param(
            {"n_embd": 64, "n_head": 5},
            r"GPT2Config\.n_embd is 64 and n_head is 5: n_embd must be a multiple of n_head",
            id="heads",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        _shape(**settings)


def test_all_problems_are_in_one_error():
    with pytest.raises(
        UnsupportedError, match=r"(?s)2 settings do not fit:.*quick_gelu.*add_cross_attention"
    ):
        _shape(activation_function="quick_gelu", add_cross_attention=True)


@pytest.mark.parametrize("name", ["n_inner", "layer_norm_epsilon", "is_encoder_decoder"])
def test_a_missing_field_is_an_error_and_not_a_default(name):
    class Partial:
        model_type = "gpt2"

    for field, value in GPT2Config().to_dict().items():
        if field not in ("model_type", name):
            setattr(Partial, field, value)

    with pytest.raises(ConfigurationError, match=rf"Partial\.{name} is missing; a model of type"):
        gpt2_shape(Partial())


def test_a_field_without_a_value_is_an_error():
    config = GPT2Config()
    object.__setattr__(config, "embd_pdrop", None)

    with pytest.raises(ConfigurationError, match=r"GPT2Config\.embd_pdrop is None; it must be set"):
        gpt2_shape(config)


def test_only_an_untied_head_is_a_parameter():
    assert "output_layer.weight" not in gpt2_parameters(_shape())
    assert gpt2_parameters(_shape(tie_word_embeddings=False))["output_layer.weight"] == Vocabulary(
        "lm_head.weight"
    )
