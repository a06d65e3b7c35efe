"""Megatron's BERT: norms before attention and MLP and after the last layer, token types.

Source: transformers 5.24, models/megatron_bert/modeling_megatron_bert.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models import encoder_rows as rows
from accelerate_megatron.models.encoder import Head
from accelerate_megatron.models.encoder_fields import encoder_shape
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape

_HEADS: dict[str, Head] = {
    "MegatronBertForMaskedLM": "masked_lm",
    "MegatronBertForPreTraining": "pretraining",
    "MegatronBertForSequenceClassification": "classification",
    "MegatronBertModel": "none",
}
_ROWS: rows.Rows = {
    **rows.EMBEDDING,
    **rows.fused_norm(f"{rows.LAYER}.self_attention.linear_qkv", f"{rows.HF}.attention.ln"),
    **rows.ATTENTION,
    **rows.fused_norm(f"{rows.LAYER}.mlp.linear_fc1", f"{rows.HF}.ln"),
    **rows.MLP,
    **rows.both("encoder.final_layernorm", "bert.encoder.ln"),
}


def megatron_bert_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a Megatron BERT with the head of `shape`."""
    return rows.encoder_table(_ROWS, shape)


def megatron_bert_shape(config: Any) -> ModelShape:
    """Translate a `MegatronBertConfig`; see `encoder_shape`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing, or the sizes contradict each other.
    """
    return encoder_shape(config, model_type="megatron-bert", heads=_HEADS, norm_after=False)


MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architectures=tuple(_HEADS),
    shape=megatron_bert_shape,
    parameters=megatron_bert_parameters,
    base_prefix=rows.BASE_PREFIX,
    disk_extras=rows.DISK_EXTRAS,
    disk_copies=rows.DISK_COPIES,
)
