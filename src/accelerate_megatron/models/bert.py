"""BERT: norms after the residual sums and on the embeddings, token types, learned positions.

Source: transformers 5.24, models/bert/modeling_bert.py.
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
    "BertForMaskedLM": "masked_lm",
    "BertForPreTraining": "pretraining",
    "BertForSequenceClassification": "classification",
    "BertModel": "none",
}
_ROWS: rows.Rows = {
    **rows.EMBEDDING,
    **rows.both("embedding.layer_norm", "bert.embeddings.LayerNorm"),
    **rows.ATTENTION,
    **rows.both(f"{rows.LAYER}.post_self_attn_layernorm", f"{rows.HF}.attention.output.LayerNorm"),
    **rows.MLP,
    **rows.both(f"{rows.LAYER}.post_mlp_layernorm", f"{rows.HF}.output.LayerNorm"),
}


def bert_parameters(shape: ModelShape) -> Mapping[str, Parameter]:
    """Return the table of a BERT with the head of `shape`."""
    return rows.encoder_table(_ROWS, shape)


def bert_shape(config: Any) -> ModelShape:
    """Translate a `BertConfig`; see `encoder_shape`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing, or the sizes contradict each other.
    """
    return encoder_shape(config, model_type="bert", heads=_HEADS, norm_after=True)


BERT = Family(
    model_type="bert",
    architectures=tuple(_HEADS),
    shape=bert_shape,
    parameters=bert_parameters,
    base_prefix=rows.BASE_PREFIX,
    disk_extras=rows.DISK_EXTRAS,
    disk_copies=rows.DISK_COPIES,
)
