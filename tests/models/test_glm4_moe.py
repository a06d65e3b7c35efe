from __future__ import annotations

import pytest
from transformers import Glm4MoeConfig

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.glm4_moe import glm4_moe_shape


def _config(**settings):
    fields = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
    }
    return Glm4MoeConfig(**(fields | settings))


def test_the_experts_come_from_the_config():
    config = _config(n_group=4, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=3)

    shape = glm4_moe_shape(config)

    assert shape.experts == Experts(
        num_experts=8,
        top_k=4,
        ffn_hidden_size=32,
        score="sigmoid",
        scaling_factor=2.5,
        num_groups=4,
        top_groups=2,
        correction_bias=True,
        shared_ffn_hidden_size=64,
        dense_layers=(0, 1, 2),
    )


def test_half_of_a_heads_channels_are_turned_unless_the_config_says_otherwise():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}

    assert glm4_moe_shape(_config()).rotary_channels == 12
    assert glm4_moe_shape(_config(rope_parameters=rope)).rotary_channels is None


def test_attention_biases_are_those_of_queries_keys_and_values():
    shape = glm4_moe_shape(_config(attention_bias=True, use_qk_norm=True))

    assert shape.qkv_bias
    assert not shape.attention_output_bias
    assert shape.qk_norm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"norm_topk_prob": False},
            r"Glm4MoeConfig\.norm_topk_prob is False: .*set norm_topk_prob to True",
            id="unnormalised",
        ),
        pytest.param(
            {"n_group": 4, "topk_group": 1},
            r"num_experts_per_tok is 4 and topk_group is 1: .*twice topk_group",
            id="groups-read-otherwise",
        ),
        pytest.param(
            {"n_group": 3, "topk_group": 2},
            r"n_group is 3 and topk_group is 2: n_group must divide the 8 experts",
            id="groups-not-divisible",
        ),
        pytest.param(
            {"n_shared_experts": 0}, r"n_shared_experts is 0; it must be at least 1", id="no-shared"
        ),
        pytest.param(
            {"first_k_dense_replace": 4},
            r"first_k_dense_replace is 4: of the 4 layers one at least must have experts; it can "
            r"be 0 to 3",
            id="all-dense",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings, message):
    with pytest.raises(UnsupportedError, match=message):
        glm4_moe_shape(_config(**settings))
