"""Every layout gives what the Hugging Face model gives in one plain PyTorch process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import LinearSchedule, OracleCase, OracleRun
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches, ragged_samples
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase, RankResult, Schedule, train

LAYOUTS = [
    pytest.param(LayoutCase(1), id="1"),
    pytest.param(LayoutCase(2, {"tp_degree": 2}), id="tp2"),
    pytest.param(LayoutCase(4, {"tp_degree": 4}), id="tp4"),
    pytest.param(LayoutCase(2, {"pp_degree": 2}, 4), id="pp2"),
    pytest.param(LayoutCase(4, {"pp_degree": 4}, 4), id="pp4"),
    pytest.param(LayoutCase(2), id="dp2"),
    pytest.param(LayoutCase(4, {"tp_degree": 2, "pp_degree": 2}), id="tp2-pp2"),
    pytest.param(LayoutCase(4, {"tp_degree": 2, "sequence_parallelism": True}), id="tp2-dp2-sp"),
    pytest.param(
        LayoutCase(2, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}, 4),
        id="pp2-vp2",
    ),
    pytest.param(LayoutCase(2, {"use_distributed_optimizer": True}), id="dp2-dist-opt"),
]
# Four key/value heads, so that TP4 can split them; grouped queries have tests of their own.
MODELS = [
    pytest.param(TinyModel("gpt2"), id="gpt2-tied"),
    pytest.param(TinyModel("gpt2", tied=False), id="gpt2-untied", marks=pytest.mark.slow),
    pytest.param(
        TinyModel("llama", tied=True, changes={"num_key_value_heads": 4}),
        id="llama-tied",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        TinyModel("llama", tied=False, changes={"num_key_value_heads": 4}), id="llama-untied"
    ),
]
ADAMW = TinyOptimizer("adamw", {"lr": 1e-3, "weight_decay": 0.1})
SGD = TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9})
SCHEDULE = Schedule(warmup=2, total=10)

# Four full batches of 8 and a last one of 5, of different lengths, with -100 labels.
SAMPLES = ragged_samples(4 * GLOBAL_BATCH_ROWS + 5)

# fp32 on CPU: the layouts add the same terms in other orders. The first loss has seen one
# forward pass, the later ones the rounding of all updates before them.
FIRST_LOSS = 1e-5
LATER_LOSSES = 1e-4
GRAD_NORM = 1e-4  # relative
WEIGHTS = 1e-4  # relative to the largest weight of the tensor


def oracle_case(model: TinyModel, optimizer: TinyOptimizer) -> OracleCase:
    return OracleCase(
        model=model,
        optimizer=optimizer,
        batches=global_batches(SAMPLES, GLOBAL_BATCH_ROWS),
        clip=1.0,
        schedule=LinearSchedule(warmup_steps=SCHEDULE.warmup, decay_steps=SCHEDULE.total),
    )


def expected(model: TinyModel, optimizer: TinyOptimizer) -> OracleRun:
    return oracle_run(oracle_case(model, optimizer))


def check_losses_and_norms(ranks: list[RankResult], oracle: OracleRun) -> None:
    for result in ranks:
        assert result.losses == ranks[0].losses, "the loss differs between ranks"
        assert result.grad_norms == ranks[0].grad_norms, "the norm differs between ranks"
    losses, norms = torch.tensor(ranks[0].losses), torch.tensor(ranks[0].grad_norms)
    wanted = torch.tensor(oracle.losses)
    assert len(losses) == len(wanted)
    assert abs(losses[0] - wanted[0]) <= FIRST_LOSS
    torch.testing.assert_close(losses, wanted, rtol=0, atol=LATER_LOSSES)
    torch.testing.assert_close(norms, torch.tensor(oracle.grad_norms), rtol=GRAD_NORM, atol=0)


def check_weights(weights: dict[str, torch.Tensor] | None, oracle: OracleRun) -> None:
    assert weights is not None
    assert set(weights) <= set(oracle.weights)
    for name, value in weights.items():
        wanted = oracle.weights[name]
        difference = (value - wanted).abs().max() / wanted.abs().max()
        assert difference <= WEIGHTS, f"{name} is off by {difference:.1e} of its largest weight"


def without_key_biases(weights: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Zero GPT-2's key biases, so that two results compare equal there.

    Without rotary positions a key bias adds the same number to all scores of a query, so its
    gradient is zero up to rounding, and AdamW divides that noise by its own size.
    """
    assert weights is not None
    kept = {}
    for name, value in weights.items():
        kept[name] = value.clone()
        if name.endswith("c_attn.bias"):
            third = len(value) // 3
            kept[name][third : 2 * third] = 0
    return kept


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adamw_training_equals_plain_pytorch(layout: LayoutCase, model: TinyModel) -> None:
    ranks = run_ranks(train, layout, model, ADAMW, SAMPLES, SCHEDULE, num_ranks=layout.num_ranks)

    oracle = expected(model, ADAMW)
    check_losses_and_norms(ranks, oracle)
    oracle = replace(oracle, weights=without_key_biases(oracle.weights))
    check_weights(without_key_biases(ranks[-1].weights), oracle)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sgd_training_equals_plain_pytorch(layout: LayoutCase, model: TinyModel) -> None:
    ranks = run_ranks(train, layout, model, SGD, SAMPLES, SCHEDULE, num_ranks=layout.num_ranks)

    oracle = expected(model, SGD)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)
