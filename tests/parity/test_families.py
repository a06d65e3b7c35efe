"""Every family gives transformers' logits, loss, gradient norm and update on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, ragged_samples
from tests.parity.families import one_update

# Longer than the windows below, and of different lengths.
SAMPLES = ragged_samples(4, max_length=24, min_length=9)
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LAYER_TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def recipe(family: str, *, tied: bool = False, **changes: Any) -> TinyModel:
    return TinyModel(family, tied=tied, changes=changes)


MODELS = [
    pytest.param(recipe("mistral", sliding_window=5), id="mistral-window-5"),
    pytest.param(recipe("qwen2", tied=True, vocab_size=101), id="qwen2-tied-vocab-101"),
    pytest.param(recipe("qwen3", head_dim=24, tied=True), id="qwen3-tied-head-24"),
    pytest.param(
        recipe("phi3", sliding_window=6, rope_parameters=PARTIAL_ROPE), id="phi3-partial-window-6"
    ),
    pytest.param(recipe("starcoder2", tied=True, sliding_window=1), id="starcoder2-tied-window-1"),
    pytest.param(
        recipe("stablelm", use_qkv_bias=True, vocab_size=101),
        id="stablelm-qkv-bias-vocab-101",
        marks=pytest.mark.slow,
    ),
    pytest.param(recipe("llama", attention_bias=True), id="llama-attention-bias"),
]
VARIANTS = [
    pytest.param(recipe("mistral", sliding_window=None, head_dim=24), id="mistral-head-24"),
    pytest.param(recipe("mistral", sliding_window=24, tied=True), id="mistral-window-24-tied"),
    pytest.param(
        recipe("qwen2", use_sliding_window=True, sliding_window=4, layer_types=LAYER_TYPES),
        id="qwen2-windows-by-layer",
    ),
    pytest.param(
        recipe(
            "qwen3",
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=3,
            max_window_layers=2,
            vocab_size=101,
        ),
        id="qwen3-biases-windows-by-layer",
    ),
    pytest.param(recipe("phi3", tied=True, num_key_value_heads=4), id="phi3-tied-no-groups"),
    pytest.param(recipe("starcoder2", use_bias=False), id="starcoder2-no-bias"),
    pytest.param(
        recipe("stablelm", tied=True, rope_parameters=PARTIAL_ROPE, layer_norm_eps=1e-2),
        id="stablelm-tied-half-rotary-eps",
    ),
    pytest.param(recipe("llama", mlp_bias=True), id="llama-mlp-bias"),
    pytest.param(recipe("llama", num_key_value_heads=1), id="llama-one-kv-head"),
    pytest.param(recipe("llama", tied=True, head_dim=24), id="llama-tied-head-24"),
    pytest.param(recipe("gpt2", tied=True), id="gpt2-tied"),
    pytest.param(recipe("gpt2", vocab_size=101), id="gpt2-untied-vocab-101"),
]
LAYOUTS = [
    pytest.param(1, {}, id="1", marks=pytest.mark.slow),
    pytest.param(2, {"tp_degree": 2}, id="tp2", marks=pytest.mark.slow),
    pytest.param(2, {"pp_degree": 2}, id="pp2", marks=pytest.mark.slow),
    pytest.param(4, {"tp_degree": 2, "pp_degree": 2}, id="tp2-pp2"),
    # Two key/value heads: two ranks share each of them.
    pytest.param(4, {"tp_degree": 4}, id="tp4", marks=pytest.mark.slow),
    pytest.param(4, {"tp_degree": 4, "sequence_parallelism": True}, id="tp4-sp"),
    pytest.param(8, {"tp_degree": 4, "pp_degree": 2}, id="tp4-pp2", marks=pytest.mark.slow),
]


def check(model: TinyModel, num_ranks: int, plugin: dict[str, Any]) -> None:
    ranks = run_ranks(one_update, model, plugin, SAMPLES, num_ranks=num_ranks)

    hf_model = model.build().eval()
    with torch.no_grad():
        wanted = hf_model(pad_samples(SAMPLES)["input_ids"]).logits
    oracle = oracle_run(
        OracleCase(
            model=model,
            optimizer=TinyOptimizer("sgd", {"lr": 0.1}),
            batches=[pad_samples(SAMPLES)],
        )
    )
    with_logits = [rank for rank in ranks if rank.logits is not None]
    assert len(with_logits) == num_ranks // plugin.get("pp_degree", 1)
    for rank in with_logits:
        limit = 1e-5 * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(rank.logits, wanted, rtol=0, atol=limit)
    for rank in ranks:
        assert abs(rank.loss - oracle.losses[0]) <= 1e-5
        assert abs(rank.grad_norm / oracle.grad_norms[0] - 1) <= 1e-5
    saved_buffers = {n: b for n, b in hf_model.named_buffers() if n in hf_model.state_dict()}
    check_exported(ranks[-1].exported, {**dict(hf_model.named_parameters()), **saved_buffers})
    for name, value in ranks[-1].updated.items():
        torch.testing.assert_close(value, oracle.weights[name], rtol=0, atol=1e-5)


def check_exported(
    exported: dict[str, torch.Tensor] | None, wanted: dict[str, torch.Tensor]
) -> None:
    assert exported is not None
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(("num_ranks", "plugin"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_family_equals_transformers_on_every_layout(
    model: TinyModel, num_ranks: int, plugin: dict[str, Any]
) -> None:
    check(model, num_ranks, plugin)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "plugin"), LAYOUTS)
@pytest.mark.parametrize("model", VARIANTS)
def test_every_variant_equals_transformers_on_every_layout(
    model: TinyModel, num_ranks: int, plugin: dict[str, Any]
) -> None:
    check(model, num_ranks, plugin)
