"""The oracle agrees with the loss of transformers itself and stays free of what it judges."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import LinearSchedule, OracleCase
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches, ragged_samples

MODELS = [
    pytest.param(TinyModel("gpt2"), id="gpt2"),
    pytest.param(TinyModel("llama", tied=False), id="llama"),
]


@pytest.mark.parametrize("model", MODELS)
def test_first_loss_is_the_loss_transformers_computes(model):
    batches = global_batches(ragged_samples(4), rows=4)

    run = oracle_run(OracleCase(model, TinyOptimizer(), batches))

    expected = model.build()(**batches[0]).loss.item()
    assert run.losses[0] == pytest.approx(expected, abs=1e-5)
    assert run.foreign_modules == []


def test_micro_batches_change_nothing_but_rounding():
    batches = global_batches(ragged_samples(8), rows=4)

    whole = oracle_run(OracleCase(TinyModel(), TinyOptimizer(), batches))
    split = oracle_run(OracleCase(TinyModel(), TinyOptimizer(), batches, micro_batch_rows=1))

    assert split.losses == pytest.approx(whole.losses, abs=1e-5)
    assert split.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)


def test_warm_up_starts_at_the_initial_rate_and_decay_ends_at_the_smallest():
    schedule = LinearSchedule(warmup_steps=2, decay_steps=4, min_lr=0.1)

    rates = [schedule.rate(step, max_lr=1.0) for step in range(6)]

    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_groups_and_frozen_parameters_are_those_of_the_recipe():
    recipe = TinyOptimizer(
        settings={"lr": 0.1, "weight_decay": 0.1},
        groups=(("bias", {"weight_decay": 0.0}),),
        frozen=("wpe",),
    )
    batches = global_batches(ragged_samples(2), rows=2)

    run = oracle_run(OracleCase(TinyModel(), recipe, batches))

    start = TinyModel().build().state_dict()
    unchanged = [name for name in start if torch.equal(start[name], run.weights[name])]
    assert unchanged == ["transformer.wpe.weight"]
    assert len(run.rates[0]) == 2


def test_bf16_stays_near_fp32():
    batches = global_batches(ragged_samples(8), rows=4)

    exact = oracle_run(OracleCase(TinyModel(), TinyOptimizer(), batches))
    rounded = oracle_run(OracleCase(TinyModel(), TinyOptimizer(), batches, dtype="bf16"))

    # bf16 keeps 8 bits: each value is off by up to 2^-9 of itself, a loss of about 5 by 1e-2.
    assert rounded.losses == pytest.approx(exact.losses, abs=0.05)
    assert rounded.weights["lm_head.weight"].dtype == torch.float32
