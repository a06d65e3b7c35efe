"""Rows of parameter tables that Llama and its kin share. No torch here.

A family's table is these dicts put together, each one part of a layer. What a family has of its
own stands in its own file.
"""

from __future__ import annotations

from accelerate_megatron.models.parameters import (
    Direct,
    PackedGateUp,
    PackedQKV,
    Parameter,
    Vocabulary,
)

HF = "model.layers.{layer}"
"""Prefix of a layer's names in Hugging Face's models."""
LAYER = "decoder.layers.{layer}"
"""Prefix of a layer's names in Megatron's models."""

Rows = dict[str, Parameter]

EMBEDDING: Rows = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight"),
}

ATTENTION: Rows = {
    f"{LAYER}.self_attention.linear_qkv.layer_norm_weight": Direct(f"{HF}.input_layernorm.weight"),
    f"{LAYER}.self_attention.linear_qkv.weight": PackedQKV(
        q=f"{HF}.self_attn.q_proj.weight",
        k=f"{HF}.self_attn.k_proj.weight",
        v=f"{HF}.self_attn.v_proj.weight",
    ),
    f"{LAYER}.self_attention.linear_proj.weight": Direct(f"{HF}.self_attn.o_proj.weight"),
}
QKV_BIAS: Rows = {
    f"{LAYER}.self_attention.linear_qkv.bias": PackedQKV(
        q=f"{HF}.self_attn.q_proj.bias",
        k=f"{HF}.self_attn.k_proj.bias",
        v=f"{HF}.self_attn.v_proj.bias",
    ),
}
OUTPUT_BIAS: Rows = {
    f"{LAYER}.self_attention.linear_proj.bias": Direct(f"{HF}.self_attn.o_proj.bias"),
}
QK_NORM: Rows = {
    f"{LAYER}.self_attention.q_layernorm.weight": Direct(f"{HF}.self_attn.q_norm.weight"),
    f"{LAYER}.self_attention.k_layernorm.weight": Direct(f"{HF}.self_attn.k_norm.weight"),
}

GATED_MLP: Rows = {
    f"{LAYER}.mlp.linear_fc1.layer_norm_weight": Direct(f"{HF}.post_attention_layernorm.weight"),
    f"{LAYER}.mlp.linear_fc1.weight": PackedGateUp(
        gate=f"{HF}.mlp.gate_proj.weight", up=f"{HF}.mlp.up_proj.weight"
    ),
    f"{LAYER}.mlp.linear_fc2.weight": Direct(f"{HF}.mlp.down_proj.weight"),
}
GATED_MLP_BIAS: Rows = {
    f"{LAYER}.mlp.linear_fc1.bias": PackedGateUp(
        gate=f"{HF}.mlp.gate_proj.bias", up=f"{HF}.mlp.up_proj.bias"
    ),
    f"{LAYER}.mlp.linear_fc2.bias": Direct(f"{HF}.mlp.down_proj.bias"),
}

FINAL_NORM: Rows = {"decoder.final_layernorm.weight": Direct("model.norm.weight")}
NORM_BIASES: Rows = {
    f"{LAYER}.self_attention.linear_qkv.layer_norm_bias": Direct(f"{HF}.input_layernorm.bias"),
    f"{LAYER}.mlp.linear_fc1.layer_norm_bias": Direct(f"{HF}.post_attention_layernorm.bias"),
}
"""Of the layers' LayerNorms; RMSNorm has none."""
FINAL_NORM_BIAS: Rows = {"decoder.final_layernorm.bias": Direct("model.norm.bias")}
UNTIED_HEAD: Rows = {"output_layer.weight": Vocabulary("lm_head.weight")}

OLD_ROTARY_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Names in old folders that hold no weights: rotary frequencies, which follow from the config."""
