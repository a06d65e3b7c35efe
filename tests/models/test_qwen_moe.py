from __future__ import annotations

import pytest
from transformers import Qwen2MoeConfig, Qwen3MoeConfig

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.qwen2_moe import qwen2_moe_parameters, qwen2_moe_shape
from accelerate_megatron.models.qwen3_moe import qwen3_moe_parameters, qwen3_moe_shape

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_the_experts_of_a_qwen3_moe_come_from_the_config():
    config = Qwen3MoeConfig(
        **SIZES,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        output_router_logits=True,
        router_aux_loss_coef=0.02,
    )

    shape = qwen3_moe_shape(config)

    assert shape.experts == Experts(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=32,
        normalize_top_k=True,
        dense_layers=(1,),
        balance_coefficient=0.02,
    )
    assert shape.ffn_hidden_size == 96
    assert shape.qk_norm


def test_the_experts_of_a_qwen2_moe_come_from_the_config():
    config = Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=48, decoder_sparse_step=2)

    shape = qwen2_moe_shape(config)

    assert shape.experts == Experts(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=32,
        normalize_top_k=False,
        shared_ffn_hidden_size=48,
        shared_gate=True,
        dense_layers=(0, 2),
    )
    assert shape.qkv_bias
    assert not shape.attention_output_bias
    assert shape.attention_windows == ()


def test_windows_of_a_qwen2_moe_are_taken_by_layer():
    config = Qwen2MoeConfig(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=3)

    assert qwen2_moe_shape(config).attention_windows == (5, None, 5, None)


@pytest.mark.parametrize(
    ("config_class", "shape_of", "parameters_of"),
    [
        pytest.param(Qwen2MoeConfig, qwen2_moe_shape, qwen2_moe_parameters, id="qwen2"),
        pytest.param(Qwen3MoeConfig, qwen3_moe_shape, qwen3_moe_parameters, id="qwen3"),
    ],
)
def test_an_ordinary_mlp_is_in_the_table_only_where_a_layer_has_one(
    config_class, shape_of, parameters_of
):
    name = "decoder.layers.{layer}.mlp.linear_fc1.weight"

    assert name not in parameters_of(shape_of(config_class(**SIZES)))
    assert name in parameters_of(shape_of(config_class(**SIZES, mlp_only_layers=[0])))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"mlp_only_layers": [0, 1, 2, 3]},
            r"gives none of its 4 layers experts \(num_experts 4, decoder_sparse_step 1, "
            r"mlp_only_layers \[0, 1, 2, 3\]\)",
            id="no-layer",
        ),
        pytest.param(
            {"decoder_sparse_step": 0},
            r"decoder_sparse_step is 0; it must be at least 1",
            id="step",
        ),
        pytest.param(
            {"norm_topk_prob": True, "num_experts_per_tok": 1},
            r"num_experts_per_tok is 1 and the weights",
            id="top-1",
        ),
    ],
)
@pytest.mark.parametrize(
    ("config_class", "shape_of"),
    [
        pytest.param(Qwen2MoeConfig, qwen2_moe_shape, id="qwen2"),
        pytest.param(Qwen3MoeConfig, qwen3_moe_shape, id="qwen3"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(config_class, shape_of, settings, message):
    with pytest.raises(UnsupportedError, match=message):
        shape_of(config_class(**(SIZES | settings)))
