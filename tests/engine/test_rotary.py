"""Rotary frequencies are transformers' own, for every scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0}
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {**YARN, "original_max_position_embeddings": 4096},
    "yarn-untruncated": {
        **YARN,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3-short": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 32,
    },
}


def frequencies(ropes: dict[str, Any], head_dim: int) -> dict[str, torch.Tensor]:
    from accelerate_megatron import engine

    engine.activate("cpu")
    from accelerate_megatron.engine.rotary import inverse_frequencies

    return {name: inverse_frequencies(rope, head_dim) for name, rope in ropes.items()}


@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_equal_transformers_bit_for_bit(head_dim: int) -> None:
    (found,) = run_ranks(frequencies, ROPES, head_dim, num_ranks=1)

    for name, rope in ROPES.items():
        changes = {"head_dim": head_dim, "rope_parameters": rope, "max_position_embeddings": 65536}
        config = TinyModel("llama", changes=changes).config()
        wanted = LlamaRotaryEmbedding(config).inv_freq
        torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=0, msg=name)
        assert found[name].dtype == torch.float32
