"""GPT-2: learned positions, LayerNorm, biases everywhere, Conv1D weights.

Source: transformers 5.24, models/gpt2/modeling_gpt2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models.family import Family
from accelerate_megatron.models.hf_config import (
    activation,
    activation_problems,
    common_problems,
    field,
    refuse,
    required,
    switch_problems,
)
from accelerate_megatron.models.parameters import Direct, Parameter, StackedQKV, Vocabulary
from accelerate_megatron.models.shape import ModelShape

_HF = "transformer.h.{layer}"
_LAYER = "decoder.layers.{layer}"

# Conv1D keeps its weight as [in, out], hence `transposed`.
_PARAMETERS: dict[str, Parameter] = {
    "embedding.word_embeddings.weight": Vocabulary("transformer.wte.weight"),
    "embedding.position_embeddings.weight": Direct("transformer.wpe.weight"),
    f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight": Direct(f"{_HF}.ln_1.weight"),
    f"{_LAYER}.self_attention.linear_qkv.layer_norm_bias": Direct(f"{_HF}.ln_1.bias"),
    f"{_LAYER}.self_attention.linear_qkv.weight": StackedQKV(
        f"{_HF}.attn.c_attn.weight", transposed=True
    ),
    f"{_LAYER}.self_attention.linear_qkv.bias": StackedQKV(f"{_HF}.attn.c_attn.bias"),
    f"{_LAYER}.self_attention.linear_proj.weight": Direct(
        f"{_HF}.attn.c_proj.weight", transposed=True
    ),
    f"{_LAYER}.self_attention.linear_proj.bias": Direct(f"{_HF}.attn.c_proj.bias"),
    f"{_LAYER}.mlp.linear_fc1.layer_norm_weight": Direct(f"{_HF}.ln_2.weight"),
    f"{_LAYER}.mlp.linear_fc1.layer_norm_bias": Direct(f"{_HF}.ln_2.bias"),
    f"{_LAYER}.mlp.linear_fc1.weight": Direct(f"{_HF}.mlp.c_fc.weight", transposed=True),
    f"{_LAYER}.mlp.linear_fc1.bias": Direct(f"{_HF}.mlp.c_fc.bias"),
    f"{_LAYER}.mlp.linear_fc2.weight": Direct(f"{_HF}.mlp.c_proj.weight", transposed=True),
    f"{_LAYER}.mlp.linear_fc2.bias": Direct(f"{_HF}.mlp.c_proj.bias"),
    "decoder.final_layernorm.weight": Direct("transformer.ln_f.weight"),
    "decoder.final_layernorm.bias": Direct("transformer.ln_f.bias"),
}
_UNTIED: dict[str, Parameter] = {"output_layer.weight": Vocabulary("lm_head.weight")}


def gpt2_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a GPT-2; an untied head is a parameter of its own."""
    return _PARAMETERS if shape.tied_embeddings else {**_PARAMETERS, **_UNTIED}


def gpt2_shape(config: Any) -> ModelShape:
    """Translate a `GPT2Config`.

    `reorder_and_upcast_attn` changes only the precision of the scores, which the engine's
    attention chooses itself.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing, or the sizes contradict each other.
    """
    refuse(_problems(config))
    hidden_size = required(config, "n_embd")
    num_heads = required(config, "n_head")
    n_inner = field(config, "n_inner")
    return ModelShape(
        model_type="gpt2",
        num_layers=required(config, "n_layer"),
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size if n_inner is None else n_inner,
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        kv_channels=hidden_size // num_heads,
        vocab_size=required(config, "vocab_size"),
        max_positions=required(config, "n_positions"),
        normalization="LayerNorm",
        norm_epsilon=required(config, "layer_norm_epsilon"),
        activation=activation(config, "activation_function"),
        gated_mlp=False,
        linear_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        position_embedding="learned_absolute",
        tied_embeddings=required(config, "tie_word_embeddings"),
        softmax_scale=None if required(config, "scale_attn_weights") else 1.0,
        scale_attention_by_layer=required(config, "scale_attn_by_inverse_layer_idx"),
        embedding_dropout=required(config, "embd_pdrop"),
        hidden_dropout=required(config, "resid_pdrop"),
        attention_dropout=required(config, "attn_pdrop"),
        initializer_range=required(config, "initializer_range"),
    )


def _problems(config: Any) -> list[str]:
    problems = [
        *common_problems(config),
        *activation_problems(config, "activation_function"),
        *switch_problems(
            config,
            "add_cross_attention",
            reason="the engine builds self-attention only; set it to False.",
        ),
    ]
    hidden_size, num_heads = required(config, "n_embd"), required(config, "n_head")
    if hidden_size % num_heads:
        problems.append(
            f"GPT2Config.n_embd is {hidden_size} and n_head is {num_heads}: "
            "n_embd must be a multiple of n_head."
        )
    return problems


GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    shape=gpt2_shape,
    parameters=gpt2_parameters,
    base_prefix="transformer",
    disk_extras=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    narrowed_init=(r".*\.c_proj\.weight",),
)
