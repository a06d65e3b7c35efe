"""T5: an encoder and a decoder with relative positions; v1.1 with a gated MLP and its own head.

Attention scores are not scaled, and heads need not divide the hidden size.

Source: transformers 5.24, models/t5/modeling_t5.py and configuration_t5.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models.encoder_decoder import EncoderDecoder
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import (
    activation,
    activation_problems,
    quantization_problems,
    refuse,
    required,
)
from accelerate_megatron.models.parameters import (
    Direct,
    PackedGateUp,
    PackedKV,
    PackedQKV,
    Parameter,
    Vocabulary,
)
from accelerate_megatron.models.shape import ModelShape

EMBEDDING_COPIES = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
}
"""Names under which old folders hold the shared embedding again."""
UNUSED_BIAS = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
"""In old folders only: cross attention has no positions."""


def t5_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a T5 or mT5."""
    return {
        "embedding.word_embeddings.weight": Vocabulary("shared.weight"),
        **_stack("encoder", shape, mlp=1),
        **_stack("decoder", shape, mlp=2),
        **_cross_attention("decoder.block.{layer}.layer.1"),
        **({} if shape.tied_embeddings else {"output_layer.weight": Vocabulary("lm_head.weight")}),
    }


def _stack(stack: str, shape: ModelShape, *, mlp: int) -> dict[str, Parameter]:
    """Return the rows of one stack; `mlp` is the place of the MLP in a Hugging Face layer."""
    layer, hf = f"{stack}.layers.{{layer}}", f"{stack}.block.{{layer}}.layer"
    attention, dense = f"{hf}.0.SelfAttention", f"{hf}.{mlp}.DenseReluDense"
    return {
        f"{stack}_relative_pos_emb.relative_attention_bias.weight": Direct(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ),
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": Direct(f"{hf}.0.layer_norm.weight"),
        f"{layer}.self_attention.linear_qkv.weight": PackedQKV(
            q=f"{attention}.q.weight", k=f"{attention}.k.weight", v=f"{attention}.v.weight"
        ),
        f"{layer}.self_attention.linear_proj.weight": Direct(f"{attention}.o.weight"),
        f"{layer}.mlp.linear_fc1.layer_norm_weight": Direct(f"{hf}.{mlp}.layer_norm.weight"),
        f"{layer}.mlp.linear_fc1.weight": (
            PackedGateUp(gate=f"{dense}.wi_0.weight", up=f"{dense}.wi_1.weight")
            if shape.gated_mlp
            else Direct(f"{dense}.wi.weight")
        ),
        f"{layer}.mlp.linear_fc2.weight": Direct(f"{dense}.wo.weight"),
        f"{stack}.final_layernorm.weight": Direct(f"{stack}.final_layer_norm.weight"),
    }


def _cross_attention(hf: str) -> dict[str, Parameter]:
    layer, attention = "decoder.layers.{layer}", f"{hf}.EncDecAttention"
    return {
        f"{layer}.pre_cross_attn_layernorm.weight": Direct(f"{hf}.layer_norm.weight"),
        f"{layer}.cross_attention.linear_q.weight": Direct(f"{attention}.q.weight"),
        f"{layer}.cross_attention.linear_kv.weight": PackedKV(
            k=f"{attention}.k.weight", v=f"{attention}.v.weight"
        ),
        f"{layer}.cross_attention.linear_proj.weight": Direct(f"{attention}.o.weight"),
    }


def t5_shape(config: Any) -> ModelShape:
    """Translate a `T5Config`.

    transformers sets `tie_word_embeddings` to True in every T5Config and unties the output layer
    of a folder that holds another one; whether a live model's is tied is asked of the model.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    is_scaled = required(config, "scale_decoder_outputs")
    scale = required(config, "d_model") ** -0.5 if is_scaled else 1.0
    return encoder_decoder_shape(config, "t5", output_scale=scale)


def encoder_decoder_shape(config: Any, model_type: str, *, output_scale: float) -> ModelShape:
    """Translate a config with the fields of T5's."""
    refuse(_problems(config))
    dropout = required(config, "dropout_rate")
    num_heads = required(config, "num_heads")
    return ModelShape(
        model_type=model_type,
        num_layers=required(config, "num_decoder_layers"),
        hidden_size=required(config, "d_model"),
        ffn_hidden_size=required(config, "d_ff"),
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        kv_channels=required(config, "d_kv"),
        vocab_size=required(config, "vocab_size"),
        max_positions=None,
        normalization="RMSNorm",
        norm_epsilon=required(config, "layer_norm_epsilon"),
        activation=activation(config, "dense_act_fn"),
        gated_mlp=required(config, "is_gated_act"),
        linear_bias=False,
        qkv_bias=False,
        attention_output_bias=False,
        position_embedding="relative",
        tied_embeddings=required(config, "tie_word_embeddings"),
        softmax_scale=1.0,
        embedding_dropout=dropout,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        mlp_dropout=dropout,
        initializer_range=required(config, "initializer_factor"),
        encoder_decoder=EncoderDecoder(
            num_encoder_layers=required(config, "num_layers"),
            position_buckets=required(config, "relative_attention_num_buckets"),
            max_distance=required(config, "relative_attention_max_distance"),
            output_scale=output_scale,
            decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
            pad_token_id=getattr(config, "pad_token_id", None),
        ),
    )


def _problems(config: Any) -> list[str]:
    name = type(config).__name__
    problems = [*quantization_problems(config), *activation_problems(config, "dense_act_fn")]
    if not required(config, "is_encoder_decoder"):
        problems.append(
            f"{name}.is_encoder_decoder is False: an encoder or decoder alone is not built; set "
            "it to True."
        )
    if config.relative_attention_num_buckets < 4 or config.relative_attention_num_buckets % 4:
        problems.append(
            f"{name}.relative_attention_num_buckets is {config.relative_attention_num_buckets}; "
            "the encoder halves the buckets for the two directions, and either half again for "
            "near and far: it must be a multiple of 4."
        )
    return problems


def t5_deviations(shape: ModelShape) -> Mapping[str, float]:
    """Return the deviation of each kind of tensor in a new model, by regular expression.

    Source: transformers 5.24, models/t5/modeling_t5.py, `T5PreTrainedModel._init_weights`.
    """
    factor, hidden = shape.initializer_range, shape.hidden_size
    return {
        r"(shared|lm_head)\.weight": factor,
        r".*Attention\.q\.weight": factor * (hidden * shape.kv_channels) ** -0.5,
        r".*Attention\.o\.weight": (
            factor * (shape.num_attention_heads * shape.kv_channels) ** -0.5
        ),
        r".*\.wo\.weight": factor * shape.ffn_hidden_size**-0.5,
        r".*": factor * hidden**-0.5,
    }


T5 = Family(
    model_type="t5",
    architectures=("T5ForConditionalGeneration",),
    shape=t5_shape,
    parameters=t5_parameters,
    disk_copies=EMBEDDING_COPIES,
    disk_extras=UNUSED_BIAS,
    deviations=t5_deviations,
)
