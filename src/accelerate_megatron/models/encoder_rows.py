"""Rows of parameter tables that BERT and Megatron's BERT share. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accelerate_megatron.models.parameters import Direct, PackedQKV, Parameter, Vocabulary
from accelerate_megatron.models.shape import ModelShape

HF = "bert.encoder.layer.{layer}"
"""Prefix of a layer's names in Hugging Face's models."""
LAYER = "encoder.layers.{layer}"
"""Prefix of a layer's names in Megatron's models."""
BASE_PREFIX = "bert"

Rows = dict[str, Parameter]


def both(megatron: str, hf: str) -> Rows:
    """Return the rows of the weight and the bias of one module."""
    return {f"{megatron}.{part}": Direct(f"{hf}.{part}") for part in ("weight", "bias")}


def fused_norm(megatron: str, hf: str) -> Rows:
    """Return the rows of a norm that Megatron names after the linear layer that follows it."""
    return {f"{megatron}.layer_norm_{part}": Direct(f"{hf}.{part}") for part in ("weight", "bias")}


EMBEDDING: Rows = {
    "embedding.word_embeddings.weight": Vocabulary("bert.embeddings.word_embeddings.weight"),
    "embedding.position_embeddings.weight": Direct("bert.embeddings.position_embeddings.weight"),
    "embedding.tokentype_embeddings.weight": Direct("bert.embeddings.token_type_embeddings.weight"),
}
ATTENTION: Rows = {
    **{
        f"{LAYER}.self_attention.linear_qkv.{part}": PackedQKV(
            q=f"{HF}.attention.self.query.{part}",
            k=f"{HF}.attention.self.key.{part}",
            v=f"{HF}.attention.self.value.{part}",
        )
        for part in ("weight", "bias")
    },
    **both(f"{LAYER}.self_attention.linear_proj", f"{HF}.attention.output.dense"),
}
MLP: Rows = {
    **both(f"{LAYER}.mlp.linear_fc1", f"{HF}.intermediate.dense"),
    **both(f"{LAYER}.mlp.linear_fc2", f"{HF}.output.dense"),
}
POOLER: Rows = both("pooler.dense", "bert.pooler.dense")
VOCABULARY_HEAD: Rows = {
    **both("lm_head.dense", "cls.predictions.transform.dense"),
    **both("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    "output_layer.bias": Vocabulary("cls.predictions.bias"),
}
UNTIED_HEAD: Rows = {"output_layer.weight": Vocabulary("cls.predictions.decoder.weight")}
SENTENCE_HEAD: Rows = both("binary_head", "cls.seq_relationship")
CLASSIFIER: Rows = both("classification_head", "classifier")

DISK_EXTRAS = (r"bert\.embeddings\.position_ids",)
"""Names in old folders that hold no weights."""
DISK_COPIES = {"cls.predictions.decoder.bias": "cls.predictions.bias"}


def encoder_table(layers: Rows, shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of an encoder with the head that its shape names.

    Args:
        layers: The rows of embeddings and layers.
        shape: The model.
    """
    encoder = shape.encoder
    assert encoder is not None
    table = dict(layers)
    if encoder.has_pooler:
        table |= POOLER
    if encoder.has_vocabulary_head:
        table |= VOCABULARY_HEAD
        table |= {} if shape.tied_embeddings else UNTIED_HEAD
    if encoder.head == "pretraining":
        table |= SENTENCE_HEAD
    if encoder.head == "classification":
        table |= CLASSIFIER
    if encoder.head == "none":
        return {name: _without_prefix(parameter) for name, parameter in table.items()}
    return table


def _without_prefix(parameter: Parameter) -> Parameter:
    """Return a row with the names of the encoder alone, which lack the prefix."""
    prefix = f"{BASE_PREFIX}."
    match parameter:
        case Direct(hf) | Vocabulary(hf):
            return replace(parameter, hf=hf.removeprefix(prefix))
        case PackedQKV(q, k, v):
            return PackedQKV(*(name.removeprefix(prefix) for name in (q, k, v)))
        case _:
            raise AssertionError(f"no table of an encoder has a {type(parameter).__name__}")
