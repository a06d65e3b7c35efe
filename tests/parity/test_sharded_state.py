"""Optimizer, gradients and parameters split over replicas, or in host memory: equal numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches
from tests.parity.test_parity import (
    ADAMW,
    SAMPLES,
    SCHEDULE,
    SGD,
    check_losses_and_norms,
    check_weights,
    expected,
    without_key_biases,
)
from tests.parity.training import LayoutCase, train

GPT2 = TinyModel("gpt2")
UNTIED_GPT2 = TinyModel("gpt2", tied=False)
LLAMA = TinyModel("llama", tied=False)
ADAM = TinyOptimizer("adam", {"lr": 1e-3})

DIST = {"use_distributed_optimizer": True}
OVERLAP = {
    **DIST,
    # Small enough for several buckets in so small a model.
    "other_megatron_args": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 20000,
    },
}
OFFLOAD = {"optimizer_cpu_offload": True}
OVERLAPPED_COPIES = {"overlap_cpu_optimizer_d2h_h2d": True}
FSDP = {"use_custom_fsdp": True}


def check_equal(layout: LayoutCase, model: TinyModel, optimizer: TinyOptimizer) -> None:
    ranks = run_ranks(
        train, layout, model, optimizer, SAMPLES, SCHEDULE, num_ranks=layout.num_ranks
    )

    oracle = expected(model, optimizer)
    check_losses_and_norms(ranks, oracle)
    oracle = replace(oracle, weights=without_key_biases(oracle.weights))
    check_weights(without_key_biases(ranks[-1].weights), oracle)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(ADAMW, id="adamw"), pytest.param(SGD, id="sgd", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LayoutCase(2, OVERLAP), id="dp2-overlap"),
        pytest.param(
            LayoutCase(2, {"other_megatron_args": {"overlap_grad_reduce": True}}),
            id="dp2-overlap-grads-only",
        ),
        pytest.param(
            LayoutCase(4, {**OVERLAP, "pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}),
            id="dp2-pp2-vp2-overlap",
        ),
        pytest.param(LayoutCase(1, OFFLOAD), id="offload"),
        pytest.param(LayoutCase(2, {**OFFLOAD, **DIST}), id="dp2-dist-opt-offload"),
    ],
)
def test_a_split_or_offloaded_optimizer_equals_plain_pytorch(
    layout: LayoutCase, optimizer: TinyOptimizer
) -> None:
    check_equal(layout, GPT2, optimizer)


@pytest.mark.parametrize(
    ("layout", "model", "optimizer"),
    [
        pytest.param(LayoutCase(2, FSDP), UNTIED_GPT2, ADAMW, id="gpt2-dp2-adamw"),
        pytest.param(LayoutCase(2, FSDP), LLAMA, SGD, id="llama-dp2-sgd"),
        pytest.param(
            LayoutCase(4, {**FSDP, "tp_degree": 2, "sequence_parallelism": True}),
            LLAMA,
            ADAMW,
            id="llama-tp2-sp-dp2-adamw",
        ),
        pytest.param(
            LayoutCase(4, {**FSDP, "context_parallel_size": 2}), LLAMA, SGD, id="llama-cp2-dp2-sgd"
        ),
        pytest.param(
            LayoutCase(2, {**FSDP, "recompute_granularity": "full"}),
            LLAMA,
            SGD,
            id="llama-dp2-recompute-sgd",
        ),
    ],
)
def test_fully_sharded_equals_plain_pytorch(
    layout: LayoutCase, model: TinyModel, optimizer: TinyOptimizer
) -> None:
    check_equal(layout, model, optimizer)


def test_without_per_token_loss_fully_sharded_equals_the_plain_wrapper() -> None:
    sharded, plain = (
        run_ranks(
            train,
            LayoutCase(2, {"calculate_per_token_loss": False, **more}),
            LLAMA,
            SGD,
            SAMPLES,
            num_ranks=2,
        )[0]
        for more in (FSDP, {})
    )

    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    assert sharded.grad_norms == pytest.approx(plain.grad_norms, rel=1e-4)


def state_bytes(plugin: dict[str, Any], precision: str, model: TinyModel) -> dict[str, int]:
    """Bytes of this rank's training state after one update, and the parameters of the model."""
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(**plugin)
    )
    hf_model = model.build()
    prepared, optimizer = accelerator.prepare(hf_model, ADAMW.build(hf_model))
    prepared(**global_batches(SAMPLES, 8)[0])
    megatron = optimizer.session.optimizer
    megatron = getattr(megatron, "chained_optimizers", [megatron])[0]
    states = megatron.optimizer.state
    return {
        "parameters": sum(p.numel() for p in prepared.parameters()),
        "held": sum(local(p).numel() * p.element_size() for p in prepared.parameters()),
        "gradients": sum(
            local(p.grad).numel() * p.element_size()
            for p in prepared.parameters()
            if p.grad is not None
        ),
        "optimizer": sum(
            local(value).numel() * value.element_size()
            for parameter, state in states.items()
            for value in [*(v for v in state.values() if v.dim() > 0)]
            + ([parameter] if precision != "no" else [])
        ),
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_the_distributed_optimizer_holds_12_bytes_per_parameter_over_its_ranks() -> None:
    ranks = run_ranks(state_bytes, DIST, "bf16", GPT2, num_ranks=2)

    for sizes in ranks:
        assert sizes["optimizer"] == pytest.approx(12 / 2 * sizes["parameters"], rel=0.03)


def test_fully_sharded_state_falls_with_the_ranks() -> None:
    one = run_ranks(state_bytes, FSDP, "no", LLAMA, num_ranks=1)[0]
    four = run_ranks(state_bytes, FSDP, "no", LLAMA, num_ranks=4)

    for part in ("held", "gradients", "optimizer"):
        for sizes in four:
            assert sizes[part] == pytest.approx(one[part] / 4, rel=0.10), part


def save_error(plugin: dict[str, Any], folder: str) -> str:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    hf_model = LLAMA.build()
    accelerator.prepare(hf_model, ADAMW.build(hf_model))
    try:
        accelerator.save_state(folder)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_fully_sharded_state_is_refused(tmp_path: Path) -> None:
    for error in run_ranks(save_error, FSDP, str(tmp_path), num_ranks=2):
        assert "save_pretrained writes the weights" in error


def test_bf16_fully_sharded_learns_as_the_plain_wrapper() -> None:
    sharded, plain = (
        run_ranks(train, LayoutCase(2, more), LLAMA, ADAMW, SAMPLES, None, "bf16", num_ranks=2)[0]
        for more in (FSDP, {})
    )

    # bf16 has 8 bits, and FSDP2 adds up the gradients of micro-batches in it.
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-2)
    assert sharded.grad_norms == pytest.approx(plain.grad_norms, rel=5e-2)


def prepare_error(plugin: dict[str, Any], model: TinyModel, optimizer: TinyOptimizer) -> str:
    try:
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
        hf_model = model.build()
        accelerator.prepare(hf_model, optimizer.build(hf_model))
    except ConfigurationError as error:
        return str(error)
    return ""


DIST_INSTEAD = "use_custom_fsdp=False, use_distributed_optimizer=True"


@pytest.mark.parametrize(
    ("plugin", "model", "optimizer", "num_ranks", "part", "nearest"),
    [
        pytest.param(FSDP, GPT2, ADAMW, 1, "ties its output layer", DIST_INSTEAD, id="fsdp-tied"),
        pytest.param(
            {**FSDP, "pp_degree": 2},
            LLAMA,
            ADAMW,
            2,
            "pp_degree is 2",
            "Nearest that works on 2 ranks: tp_degree=1, pp_degree=1; or tp_degree=1, pp_degree=1, "
            "context_parallel_size=2; or tp_degree=2, pp_degree=1. Nearest settings that work: "
            f"{DIST_INSTEAD}.",
            id="fsdp-pp",
        ),
        pytest.param(
            {**FSDP, **DIST},
            LLAMA,
            ADAMW,
            1,
            "use_distributed_optimizer is on",
            "use_distributed_optimizer=False; or use_custom_fsdp=False",
            id="fsdp-dist",
        ),
        pytest.param(
            {**FSDP, **OFFLOAD},
            LLAMA,
            ADAMW,
            1,
            "optimizer_cpu_offload is on",
            f"optimizer_cpu_offload=False; or {DIST_INSTEAD}.",
            id="fsdp-offload",
        ),
        pytest.param(
            OFFLOAD,
            GPT2,
            ADAM,
            1,
            "use torch.optim.AdamW or SGD",
            "optimizer_cpu_offload=False.",
            id="offload-adam",
        ),
        pytest.param(
            OVERLAPPED_COPIES,
            GPT2,
            ADAMW,
            1,
            "without optimizer_cpu_offload",
            "overlap_cpu_optimizer_d2h_h2d=False.",
            id="overlap-alone",
        ),
        pytest.param(
            {**OFFLOAD, **OVERLAPPED_COPIES},
            GPT2,
            ADAMW,
            1,
            "the model is on the CPU",
            "overlap_cpu_optimizer_d2h_h2d=False.",
            id="overlap-on-cpu",
        ),
        pytest.param(
            {**DIST, "use_precision_aware_optimizer": True},
            GPT2,
            ADAMW,
            1,
            "pip install 'transformer-engine[pytorch]'",
            "use_precision_aware_optimizer=False.",
            id="precision-aware",
        ),
    ],
)
def test_what_excludes_each_other_is_refused_with_what_works(
    plugin: dict[str, Any],
    model: TinyModel,
    optimizer: TinyOptimizer,
    num_ranks: int,
    part: str,
    nearest: str,
) -> None:
    for error in run_ranks(prepare_error, plugin, model, optimizer, num_ranks=num_ranks):
        assert part in error
        assert nearest in error
        assert "Nearest settings that work: " in error
