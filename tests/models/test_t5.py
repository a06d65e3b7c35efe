"""T5's and mT5's configs and tables."""

from __future__ import annotations

import pytest
from transformers import MT5Config, T5Config, UMT5Config

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.encoder_decoder import EncoderDecoder
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.placements import expected_hf_shapes
from tests.helpers.tiny_models import TinyModel

FIELDS = {
    "vocab_size": 99,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 5,
}


def _shape(config):
    return family_of(config).shape(config)


def test_every_field_of_the_shape_comes_from_the_config():
    config = T5Config(**FIELDS, pad_token_id=6, initializer_factor=0.5, dropout_rate=0.2)

    assert _shape(config) == ModelShape(
        model_type="t5",
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=24,
        vocab_size=99,
        max_positions=None,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        activation="relu",
        gated_mlp=False,
        linear_bias=False,
        qkv_bias=False,
        attention_output_bias=False,
        position_embedding="relative",
        tied_embeddings=True,
        softmax_scale=1.0,
        embedding_dropout=0.2,
        hidden_dropout=0.2,
        attention_dropout=0.2,
        mlp_dropout=0.2,
        initializer_range=0.5,
        encoder_decoder=EncoderDecoder(
            num_encoder_layers=2,
            position_buckets=32,
            max_distance=128,
            output_scale=0.125,
            decoder_start_token_id=5,
            pad_token_id=6,
        ),
    )


def test_v1_1_is_gated_and_not_scaled():
    config = T5Config(**FIELDS, feed_forward_proj="gated-gelu", tie_word_embeddings=False)

    shape = _shape(config)

    assert (shape.gated_mlp, shape.activation) == (True, "gelu_tanh")
    assert shape.encoder_decoder.output_scale == 1.0


def test_mt5_is_never_scaled():
    shape = _shape(MT5Config(**FIELDS))

    assert (shape.model_type, shape.encoder_decoder.output_scale) == ("mt5", 1.0)


@pytest.mark.parametrize("family", ["t5", "mt5"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_table_has_every_tensor_of_the_model(family, gated):
    words = "gated-gelu" if gated else "relu"
    changes = {"num_layers": 2, "num_decoder_layers": 3, "feed_forward_proj": words}
    model = TinyModel(family, changes=changes).build()
    shape = _shape(model.config)

    expected = expected_hf_shapes(family_of(model.config).parameters(shape), shape)

    assert expected == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_umt5_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"'umt5'; .*a relative position bias of its own"):
        family_of(UMT5Config())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_proj": "gated-tanh"}, r"T5Config\.dense_act_fn is 'tanh'"),
        ({"is_encoder_decoder": False}, r"is_encoder_decoder is False"),
        ({"relative_attention_num_buckets": 6}, r"num_buckets is 6; .*multiple of 4"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        _shape(T5Config(**(FIELDS | changes)))
