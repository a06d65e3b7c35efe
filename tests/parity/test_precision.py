"""fp16 with a dynamic loss scale, and bf16: what is skipped, what is reported, what is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase, OracleRun
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches, ragged_samples

OPTIMIZER = TinyOptimizer("adamw", {"lr": 1e-3})
SAMPLES = ragged_samples(64)
BATCHES = global_batches(SAMPLES, 8)
GPT2 = TinyModel("gpt2")
LLAMA = TinyModel("llama", tied=False)
# Half precision has 11 bits; the loss is a mean over hundreds of tokens.
HALF_LOSS = 2e-2


@dataclass
class Update:
    """What one update showed."""

    loss: float
    grad_norm: float | None
    was_skipped: bool
    scale: float
    rate: float
    weight: torch.Tensor


def updates(plugin: dict[str, Any], model: TinyModel) -> list[Update]:
    """Train on `BATCHES` in fp16, warming up the rate so that each update has another one."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        megatron_lm_plugin=MegatronLMPlugin(train_iters=100, lr_warmup_iters=50, **plugin),
    )
    hf_model = model.build()
    torch_optimizer = OPTIMIZER.build(hf_model)
    prepared, optimizer, _ = accelerator.prepare(
        hf_model, torch_optimizer, MegatronLMDummyScheduler(torch_optimizer)
    )
    prepared.train()
    seen = []
    for batch in BATCHES:
        loss = prepared(**batch).loss.item()
        seen.append(
            Update(
                loss=loss,
                grad_norm=accelerator.clip_grad_norm_(prepared.parameters(), 1.0).item(),
                was_skipped=optimizer.step_was_skipped,
                scale=float(optimizer.session.optimizer.get_loss_scale()),
                rate=optimizer.param_groups[0]["lr"],
                weight=next(iter(prepared.parameters())).detach().float().clone(),
            )
        )
        assert accelerator.optimizer_step_was_skipped == optimizer.step_was_skipped
    return seen


def scaling(initial: float, window: int = 1000, hysteresis: int = 1) -> dict[str, Any]:
    return {
        "other_megatron_args": {
            "initial_loss_scale": initial,
            "loss_scale_window": window,
            "hysteresis": hysteresis,
        }
    }


LAYOUTS = [
    pytest.param(1, {}, id="1"),
    pytest.param(2, {"tp_degree": 2, "sequence_parallelism": True}, id="tp2-sp"),
    pytest.param(2, {"pp_degree": 2, "num_micro_batches": 2}, id="pp2"),
]


@pytest.mark.parametrize(("num_ranks", "plugin"), LAYOUTS)
def test_an_overflow_skips_the_update_and_halves_the_scale(
    num_ranks: int, plugin: dict[str, Any]
) -> None:
    ranks = run_ranks(updates, {**plugin, **scaling(2.0**18)}, GPT2, num_ranks=num_ranks)

    for seen in ranks:
        skipped = [update.was_skipped for update in seen]
        assert skipped[0]
        assert not skipped[-1]
        assert skipped == [update.was_skipped for update in ranks[0]], "the ranks disagree"
        scale, rate, weight = 2.0**18, 0.0, None
        for update in seen:
            if update.was_skipped:
                scale /= 2
                # Neither the scheduler nor the weights move on a skip.
                assert update.rate == rate
                assert weight is None or torch.equal(update.weight, weight)
            else:
                assert update.rate > rate
            assert update.scale == scale
            rate, weight = update.rate, update.weight


def test_the_scale_doubles_after_a_window_without_overflow() -> None:
    seen = run_ranks(updates, scaling(2.0**4, window=2), GPT2, num_ranks=1)[0]

    assert [update.scale for update in seen] == [16, 32, 32, 64, 64, 128, 128, 256]


def oracle(model: TinyModel, dtype: str = "fp32") -> OracleRun:
    return oracle_run(
        OracleCase(model=model, optimizer=OPTIMIZER, batches=BATCHES, clip=1.0, dtype=dtype)
    )


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "plugin", [{}, {"use_distributed_optimizer": True}], ids=["plain", "dist-opt"]
)
def test_loss_and_norm_are_those_of_the_unscaled_model(
    model: TinyModel, plugin: dict[str, Any]
) -> None:
    seen = run_ranks(updates, {**plugin, **scaling(2.0**6)}, model, num_ranks=1)[0]

    assert not seen[0].was_skipped
    wanted = oracle(model)
    assert seen[0].loss == pytest.approx(wanted.losses[0], rel=HALF_LOSS)
    assert seen[0].grad_norm == pytest.approx(wanted.grad_norms[0], rel=HALF_LOSS)


def prepare_error(plugin: dict[str, Any], precision: str) -> str:
    try:
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(**plugin)
        )
        hf_model = LLAMA.build()
        accelerator.prepare(hf_model, OPTIMIZER.build(hf_model))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_fp16_is_refused_where_the_optimizer_cannot_scale() -> None:
    error = run_ranks(prepare_error, {"use_custom_fsdp": True}, "fp16", num_ranks=1)[0]

    assert "mixed_precision is 'fp16' and use_custom_fsdp is on" in error
    assert error.endswith(
        "Nearest settings that work: use_custom_fsdp=False, use_distributed_optimizer=True; or "
        "mixed_precision='bf16'; or mixed_precision='no'."
    )
