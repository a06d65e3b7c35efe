"""The shapes of Megatron's parameters, whole: not yet split, vocabulary not yet padded. No torch.

Megatron stores a linear layer's weight as [out, in]. Together with a family's table this
says, before any model is built, which Hugging Face tensors of which shapes it takes.

Source: megatron-core 0.16.1, transformer/attention.py, transformer/mlp.py and
    models/gpt/gpt_model.py; models/bert for the names of encoders.
"""

from __future__ import annotations

from collections.abc import Callable

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.encoder_decoder import EncoderDecoder
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.latent import LatentAttention
from accelerate_megatron.models.shape import ModelShape

TensorShape = tuple[int, ...]


def _vocabulary(shape: ModelShape) -> TensorShape:
    return (shape.vocab_size, shape.hidden_size)


def _learned_positions(shape: ModelShape) -> TensorShape:
    if shape.max_positions is None:
        raise UnsupportedError(
            f"The table of {shape.model_type!r} names learned positions, but its shape says that "
            "they have no end; set ModelShape.max_positions."
        )
    return (shape.max_positions, shape.hidden_size)


def _hidden(shape: ModelShape) -> TensorShape:
    return (shape.hidden_size,)


def _qkv_rows(shape: ModelShape) -> int:
    return (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.kv_channels


def _attention_width(shape: ModelShape) -> int:
    return shape.num_attention_heads * shape.kv_channels


def _attention_output(shape: ModelShape) -> TensorShape:
    return (shape.hidden_size, _attention_width(shape))


def _position_bias(shape: ModelShape) -> TensorShape:
    return (_encoder_decoder(shape).position_buckets, shape.num_attention_heads)


def _encoder_decoder(shape: ModelShape) -> EncoderDecoder:
    if shape.encoder_decoder is None:
        raise UnsupportedError(
            f"The table of {shape.model_type!r} names parameters of an encoder, but its shape has "
            "none; set ModelShape.encoder_decoder."
        )
    return shape.encoder_decoder


def _experts(shape: ModelShape) -> Experts:
    if shape.experts is None:
        raise UnsupportedError(
            f"The table of {shape.model_type!r} names parameters of experts, but its shape has "
            "none; set ModelShape.experts."
        )
    return shape.experts


def _gated(shape: ModelShape, channels: int) -> int:
    """Return the rows of a first linear layer: gate and up where it is gated."""
    return channels * (2 if shape.gated_mlp else 1)


def _shared_channels(shape: ModelShape) -> int:
    return _experts(shape).shared_ffn_hidden_size or 0


def _latent(shape: ModelShape) -> LatentAttention:
    if shape.latent is None:
        raise UnsupportedError(
            f"The table of {shape.model_type!r} names parameters of latent attention, but its "
            "shape has none; set ModelShape.latent."
        )
    return shape.latent


def _query_rank(shape: ModelShape) -> int:
    return _latent(shape).query_rank or 0


def _labels(shape: ModelShape) -> int:
    return shape.encoder.num_labels if shape.encoder is not None else 0


ENCODER_SHAPES: dict[str, Callable[[ModelShape], TensorShape]] = {
    "embedding.tokentype_embeddings.weight": lambda s: (
        s.encoder.token_types if s.encoder is not None else 0,
        s.hidden_size,
    ),
    "embedding.layer_norm.weight": _hidden,
    "embedding.layer_norm.bias": _hidden,
    "pooler.dense.weight": lambda s: (s.hidden_size, s.hidden_size),
    "pooler.dense.bias": _hidden,
    "lm_head.dense.weight": lambda s: (s.hidden_size, s.hidden_size),
    "lm_head.dense.bias": _hidden,
    "lm_head.layer_norm.weight": _hidden,
    "lm_head.layer_norm.bias": _hidden,
    "output_layer.bias": lambda s: (s.vocab_size,),
    "binary_head.weight": lambda s: (2, s.hidden_size),
    "binary_head.bias": lambda _: (2,),
    "classification_head.weight": lambda s: (_labels(s), s.hidden_size),
    "classification_head.bias": lambda s: (_labels(s),),
}
"""Of encoders such as BERT; the word and position embeddings are those of any model."""

_LAYER = "decoder.layers.{layer}"
_EXPERTS = f"{_LAYER}.mlp.experts.experts"
_SHARED = f"{_LAYER}.mlp.shared_experts"

_LATENT_SHAPES: dict[str, Callable[[ModelShape], TensorShape]] = {
    f"{_LAYER}.self_attention.linear_q_proj.weight": lambda s: (
        s.num_attention_heads * s.key_channels,
        s.hidden_size,
    ),
    f"{_LAYER}.self_attention.linear_q_down_proj.weight": lambda s: (
        _query_rank(s),
        s.hidden_size,
    ),
    f"{_LAYER}.self_attention.linear_q_up_proj.weight": lambda s: (
        s.num_attention_heads * s.key_channels,
        _query_rank(s),
    ),
    f"{_LAYER}.self_attention.linear_kv_down_proj.weight": lambda s: (
        _latent(s).key_value_rank + _latent(s).position_channels,
        s.hidden_size,
    ),
    f"{_LAYER}.self_attention.kv_layernorm.weight": lambda s: (_latent(s).key_value_rank,),
    f"{_LAYER}.self_attention.linear_kv_up_proj.weight": lambda s: (
        s.num_attention_heads * (_latent(s).content_channels + s.kv_channels),
        _latent(s).key_value_rank,
    ),
}
MEGATRON_SHAPES: dict[str, Callable[[ModelShape], TensorShape]] = {
    "embedding.word_embeddings.weight": _vocabulary,
    "embedding.position_embeddings.weight": _learned_positions,
    f"{_LAYER}.input_layernorm.weight": _hidden,
    **_LATENT_SHAPES,
    f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight": _hidden,
    f"{_LAYER}.self_attention.linear_qkv.layer_norm_bias": _hidden,
    f"{_LAYER}.self_attention.linear_qkv.weight": lambda s: (_qkv_rows(s), s.hidden_size),
    f"{_LAYER}.self_attention.linear_qkv.bias": lambda s: (_qkv_rows(s),),
    f"{_LAYER}.self_attention.q_layernorm.weight": lambda s: (
        (_query_rank(s),) if s.latent else (s.kv_channels,)
    ),
    f"{_LAYER}.self_attention.k_layernorm.weight": lambda s: (s.kv_channels,),
    f"{_LAYER}.self_attention.linear_proj.weight": _attention_output,
    f"{_LAYER}.self_attention.linear_proj.bias": _hidden,
    f"{_LAYER}.mlp.linear_fc1.layer_norm_weight": _hidden,
    f"{_LAYER}.mlp.linear_fc1.layer_norm_bias": _hidden,
    f"{_LAYER}.mlp.linear_fc1.weight": lambda s: (
        _gated(s, s.ffn_hidden_size),
        s.hidden_size,
    ),
    f"{_LAYER}.mlp.linear_fc1.bias": lambda s: (_gated(s, s.ffn_hidden_size),),
    f"{_LAYER}.mlp.linear_fc2.weight": lambda s: (s.hidden_size, s.ffn_hidden_size),
    f"{_LAYER}.mlp.linear_fc2.bias": _hidden,
    f"{_LAYER}.pre_mlp_layernorm.weight": _hidden,
    f"{_LAYER}.mlp.router.weight": lambda s: (_experts(s).num_experts, s.hidden_size),
    f"{_LAYER}.mlp.router.expert_bias": lambda s: (_experts(s).num_experts,),
    # The experts of a layer are one parameter, expert below expert.
    f"{_EXPERTS}.linear_fc1.weight": lambda s: (
        _experts(s).num_experts * _gated(s, _experts(s).ffn_hidden_size),
        s.hidden_size,
    ),
    f"{_EXPERTS}.linear_fc2.weight": lambda s: (
        _experts(s).num_experts * s.hidden_size,
        _experts(s).ffn_hidden_size,
    ),
    f"{_SHARED}.linear_fc1.weight": lambda s: (_gated(s, _shared_channels(s)), s.hidden_size),
    f"{_SHARED}.linear_fc2.weight": lambda s: (s.hidden_size, _shared_channels(s)),
    f"{_SHARED}.gate_weight": lambda s: (1, s.hidden_size),
    "decoder.final_layernorm.weight": _hidden,
    "decoder.final_layernorm.bias": _hidden,
    f"{_LAYER}.pre_cross_attn_layernorm.weight": _hidden,
    f"{_LAYER}.cross_attention.linear_q.weight": lambda s: (_attention_width(s), s.hidden_size),
    f"{_LAYER}.cross_attention.linear_kv.weight": lambda s: (
        2 * _attention_width(s),
        s.hidden_size,
    ),
    f"{_LAYER}.cross_attention.linear_proj.weight": _attention_output,
    "decoder_relative_pos_emb.relative_attention_bias.weight": _position_bias,
    "encoder_relative_pos_emb.relative_attention_bias.weight": _position_bias,
    f"{_LAYER}.post_self_attn_layernorm.weight": _hidden,
    f"{_LAYER}.post_self_attn_layernorm.bias": _hidden,
    f"{_LAYER}.post_mlp_layernorm.weight": _hidden,
    f"{_LAYER}.post_mlp_layernorm.bias": _hidden,
    "output_layer.weight": _vocabulary,
    **ENCODER_SHAPES,
}
"""By canonical name, with `{layer}` as in the families' tables.

The layers of an encoder have the shapes of a decoder's.
"""

_ENCODER, _DECODER = "encoder.", "decoder."

_OF_EXPERT_LAYERS = tuple(
    f"{_LAYER}.{name}"
    for name in ("pre_mlp_layernorm.", "mlp.router.", "mlp.experts.", "mlp.shared_experts.")
)
_OF_DENSE_LAYERS = (f"{_LAYER}.mlp.linear_fc",)


def is_in_layer(name: str, layer: int, shape: ModelShape) -> bool:
    """Return whether layer `layer`, from 0, has the parameter `name` (with `{layer}`).

    Parameters of experts are in the layers that have experts, those of an ordinary MLP in the
    others, and all the rest in every layer.
    """
    if name.startswith(_OF_EXPERT_LAYERS):
        return shape.has_experts(layer)
    return not (name.startswith(_OF_DENSE_LAYERS) and shape.has_experts(layer))


def megatron_shape(name: str, shape: ModelShape) -> TensorShape:
    """Return the shape of the whole Megatron parameter `name` (with `{layer}`) of a model.

    Raises:
        UnsupportedError: A table names a parameter that no model of this package has.
    """
    known = name
    if name.startswith(_ENCODER):
        known = _DECODER + name.removeprefix(_ENCODER)
    if known not in MEGATRON_SHAPES:
        raise UnsupportedError(
            f"The table of {shape.model_type!r} names {name!r}, which is no Megatron parameter "
            "known here; add its shape to MEGATRON_SHAPES in models/megatron_shapes.py."
        )
    return MEGATRON_SHAPES[known](shape)


def num_layers_of(name: str, shape: ModelShape) -> int:
    """Return how many layers the stack has that the parameter `name` (with `{layer}`) is in."""
    if name.startswith(_ENCODER) and shape.encoder_decoder is not None:
        return shape.encoder_decoder.num_encoder_layers
    return shape.num_layers
