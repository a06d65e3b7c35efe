from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from accelerate_megatron.config.logging import flops_per_token
from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.deepseek_v3 import deepseek_v3_parameters, deepseek_v3_shape
from accelerate_megatron.models.latent import LatentAttention
from accelerate_megatron.models.megatron_shapes import megatron_shape

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _config(**settings):
    fields = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    return DeepseekV3Config(**(fields | settings))


def test_the_low_rank_vectors_come_from_the_config():
    shape = deepseek_v3_shape(_config())

    assert shape.latent == LatentAttention(
        query_rank=24,
        key_value_rank=20,
        content_channels=12,
        position_channels=8,
        interleaved=True,
    )
    assert (shape.key_channels, shape.kv_channels, shape.rotary_channels) == (20, 16, 8)
    assert shape.softmax_scale == pytest.approx(20**-0.5)


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(YARN, id="published"),
        pytest.param({**YARN, "mscale": 0.707}, id="other-mscale"),
        pytest.param({**YARN, "mscale_all_dim": 0}, id="no-mscale"),
        pytest.param({**YARN, "attention_factor": 1.25}, id="factor-given"),
        pytest.param({**YARN, "factor": 1.0}, id="not-longer"),
    ],
)
def test_yarn_scales_scores_as_transformers_does(rope):
    config = _config(rope_parameters=rope)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)

    shape = deepseek_v3_shape(config)

    assert shape.softmax_scale == pytest.approx(model.model.layers[0].self_attn.scaling)
    scale = model.model.rotary_emb.attention_scaling
    assert shape.latent.position_scale == pytest.approx(scale)


@pytest.mark.parametrize("rank", [24, None])
def test_the_table_has_every_parameter_in_its_shape(rank):
    config = _config(q_lora_rank=rank)
    with torch.device("meta"):
        state = DeepseekV3ForCausalLM(config).state_dict()
    shape = deepseek_v3_shape(config)

    for name, parameter in deepseek_v3_parameters(shape).items():
        if ".self_attention." in name or "input_layernorm" in name:
            tensor = state[parameter.hf.format(layer=0)]
            assert megatron_shape(name, shape) == tuple(tensor.shape), name


def test_the_work_of_a_token_counts_the_low_rank_projections():
    config = _config(first_k_dense_replace=3)
    shape = deepseek_v3_shape(config)
    with torch.device("meta"):
        attention = DeepseekV3ForCausalLM(config).model.layers[0].self_attn
    projections = sum(p.numel() for name, p in attention.named_parameters() if "proj" in name)

    without = flops_per_token(replace(shape, num_layers=0), 0)

    assert flops_per_token(replace(shape, num_layers=1), 0) - without == 6 * (
        projections + 3 * 64 * 96
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"attention_bias": True}, r"attention_bias is True: .*set it to False", id="biases"
        ),
        pytest.param(
            {"num_key_value_heads": 2},
            r"num_key_value_heads is 2: .*set it to num_attention_heads, 4",
            id="shared-keys",
        ),
        pytest.param(
            {"n_group": 4, "topk_group": 1}, r"twice topk_group", id="groups-read-otherwise"
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"rope_type 'dynamic'; supported are default, linear, llama3, yarn",
            id="rope",
        ),
        pytest.param({"first_k_dense_replace": 4}, r"it can be 0 to 3", id="all-dense"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        deepseek_v3_shape(_config(**settings))
