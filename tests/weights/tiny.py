"""The tiny Hugging Face models of these tests: 4 layers, hidden 64, vocabulary 99."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCAB_SIZE = 99


def tiny_gpt2(dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    settings = {
        "n_layer": 4,
        "n_embd": 64,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return _random(GPT2LMHeadModel(GPT2Config(**{**settings, **changes})), dtype)


def tiny_llama(dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    settings = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "vocab_size": VOCAB_SIZE,
    }
    return _random(LlamaForCausalLM(LlamaConfig(**{**settings, **changes})), dtype)


def _random(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Give every parameter values of its own: as initialised, biases are 0 and norms 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=generator)
            # Not model.to(): that rounds the rotary frequencies too, as loading never does.
            parameter.data = parameter.data.to(dtype)
    return model


MODELS = [
    pytest.param(tiny_gpt2, {}, id="gpt2"),
    pytest.param(tiny_gpt2, {"tie_word_embeddings": False}, id="gpt2-untied"),
    pytest.param(tiny_gpt2, {"n_inner": 80}, id="gpt2-inner-80"),
    pytest.param(tiny_llama, {}, id="llama"),
    pytest.param(tiny_llama, {"tie_word_embeddings": True}, id="llama-tied"),
    pytest.param(tiny_llama, {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param(tiny_llama, {"head_dim": 24}, id="llama-head-dim-24"),
    pytest.param(tiny_llama, {"num_key_value_heads": 4}, id="llama-no-groups"),
]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
TP_SIZES = [pytest.param(size, id=f"tp{size}") for size in (1, 2, 4)]
