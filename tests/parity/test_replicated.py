"""What several ranks hold alike stays bitwise alike: norms, biases, routers, shared key heads."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, ragged_samples
from tests.parity.training import LayoutCase, train

SLOW = pytest.mark.slow
ADAMW = TinyOptimizer("adamw", {"lr": 1e-3, "weight_decay": 0.1})
SAMPLES = ragged_samples(20 * 8)
TP2 = {"tp_degree": 2, "sequence_parallelism": True}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pp_degree": 2}
CP2 = {"context_parallel_size": 2}
DIST = {"use_distributed_optimizer": True}
GPT2 = TinyModel("gpt2")
LLAMA = TinyModel("llama", tied=False)
MIXTRAL = TinyModel("mixtral", tied=False)


CASES = [
    pytest.param(LayoutCase(4, {**TP2, **PP2}), GPT2, id="gpt2-tp2-sp-pp2", marks=SLOW),
    pytest.param(LayoutCase(4, {**TP2, **DIST}), GPT2, id="gpt2-tp2-sp-dp2-dist-opt", marks=SLOW),
    pytest.param(LayoutCase(4, {**TP2, **CP2}), LLAMA, id="llama-cp2-tp2-sp", marks=SLOW),
    pytest.param(LayoutCase(4, {"tp_degree": 4}), LLAMA, id="llama-tp4-shared-heads", marks=SLOW),
    pytest.param(LayoutCase(2, TP2), MIXTRAL, id="mixtral-tp2-sp-replicated-experts"),
    pytest.param(LayoutCase(4, {**TP2, **EP2}), MIXTRAL, id="mixtral-ep2-tp2-sp-dp2", marks=SLOW),
    pytest.param(LayoutCase(4, {**EP2, **CP2}), MIXTRAL, id="mixtral-ep2-cp2-dp2", marks=SLOW),
    pytest.param(LayoutCase(4, {**EP2, **PP2}), MIXTRAL, id="mixtral-ep2-pp2-dp2", marks=SLOW),
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_replicas_are_bitwise_equal_after_20_updates(layout: LayoutCase, model: TinyModel) -> None:
    ranks = run_ranks(
        partial(train, by_place=True), layout, model, ADAMW, SAMPLES, num_ranks=layout.num_ranks
    )

    compared = set()
    for one, other in combinations([rank.shards for rank in ranks], 2):
        for place in one.keys() & other.keys():
            compared.add(place[0])
            assert torch.equal(one[place], other[place]), place
    kinds = {name.split(".")[-2] + "." + name.split(".")[-1] for name in compared}
    assert {"final_layernorm.weight"} <= kinds
    if model is MIXTRAL:
        assert "router.weight" in kinds
        assert any("pre_mlp_layernorm" in name for name in compared)
    if model is GPT2:
        assert {"linear_proj.bias", "linear_fc2.bias"} <= kinds
