"""A GPT-2 or BERT of transformers with rotary positions in the place of its learned ones.

transformers has no such classes. It lets a model's attention be another function, so the queries
and keys are turned by its own code of Llama before its own attention sees them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

POSITION_TABLES = ("transformer.wpe.weight", "bert.embeddings.position_embeddings.weight")
_NAME = "rotary_sdpa"


def turn_positions(model: PreTrainedModel, base: float = 10000.0) -> None:
    """Take the learned positions out of `model`, and turn its queries and keys instead.

    Args:
        model: The model, changed in place; its table of positions stays, as frozen zeros.
        base: Of the rotary frequencies.
    """
    config = model.config
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            rope_parameters={"rope_type": "default", "rope_theta": base},
        )
    )

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        positions = torch.arange(query.shape[2])[None]
        query, key = apply_rotary_pos_emb(query, key, *rotary(value, positions))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    [table] = [value for name, value in model.named_parameters() if name in POSITION_TABLES]
    with torch.no_grad():
        table.zero_()
    table.requires_grad_(False)
