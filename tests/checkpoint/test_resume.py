"""A run that is stopped and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.training import Outcome, Run, make, train
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer
from tests.parity.training import LayoutCase

GPT2 = TinyModel("gpt2", changes={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})
LLAMA = TinyModel("llama", tied=False, changes={"attention_dropout": 0.1})
MIXTRAL = TinyModel("mixtral", tied=False, changes={"attention_dropout": 0.1})
T5 = TinyModel("t5", changes={"dropout_rate": 0.1})
EP2 = {"expert_model_parallel_size": 2}
DIST = {"use_distributed_optimizer": True}
SGD = TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9})


def check_equal(uninterrupted: list[Outcome], resumed: list[Outcome], stopped_at: int) -> None:
    for whole, rest in zip(uninterrupted, resumed, strict=True):
        assert rest.losses == whole.losses[stopped_at:]
        assert rest.grad_norms == whole.grad_norms[stopped_at:]
        assert rest.rates == whole.rates[stopped_at:]
        assert rest.random == whole.random
        assert rest.counter["steps"] == whole.counter["steps"]
        assert torch.equal(rest.counter["average"], whole.counter["average"])
        for name, shard in whole.shards.items():
            assert torch.equal(rest.shards[name], shard), name


OFFLOAD = {"optimizer_cpu_offload": True}
SLOW = pytest.mark.slow

CASES = [
    pytest.param(Run(LayoutCase(2), GPT2), id="gpt2-dp2", marks=SLOW),
    pytest.param(Run(LayoutCase(2, DIST), GPT2), id="gpt2-dp2-dist-opt"),
    pytest.param(Run(LayoutCase(2, {"tp_degree": 2}), LLAMA), id="llama-tp2"),
    pytest.param(Run(LayoutCase(2, DIST), LLAMA), id="llama-dp2-dist-opt", marks=SLOW),
    pytest.param(Run(LayoutCase(2), LLAMA), id="llama-dp2", marks=SLOW),
    pytest.param(Run(LayoutCase(2), MIXTRAL), id="mixtral-dp2", marks=SLOW),
    pytest.param(Run(LayoutCase(2, DIST), MIXTRAL), id="mixtral-dp2-dist-opt", marks=SLOW),
    pytest.param(Run(LayoutCase(2, EP2), MIXTRAL), id="mixtral-ep2", marks=SLOW),
    pytest.param(Run(LayoutCase(2), T5), id="t5-dp2", marks=SLOW),
    pytest.param(Run(LayoutCase(2, DIST), T5), id="t5-dp2-dist-opt"),
    pytest.param(
        Run(LayoutCase(4, {**EP2, **DIST}), MIXTRAL), id="mixtral-dp4-ep2-dist-opt", marks=SLOW
    ),
    pytest.param(Run(LayoutCase(2), GPT2, precision="bf16"), id="gpt2-bf16", marks=SLOW),
    pytest.param(
        Run(LayoutCase(4, {"tp_degree": 2, **DIST}), LLAMA, precision="bf16"),
        id="llama-tp2-dist-opt-bf16",
    ),
    pytest.param(Run(LayoutCase(2, DIST), GPT2, precision="fp16"), id="gpt2-fp16", marks=SLOW),
    pytest.param(Run(LayoutCase(2, {"pp_degree": 2}, 4), GPT2, SGD), id="gpt2-pp2-sgd", marks=SLOW),
    pytest.param(Run(LayoutCase(2, DIST), GPT2, SGD), id="gpt2-dist-opt-sgd", marks=SLOW),
    pytest.param(
        Run(LayoutCase(2, {**DIST, **OFFLOAD}), GPT2, precision="bf16"), id="offload-bf16"
    ),
    pytest.param(Run(LayoutCase(1, OFFLOAD), GPT2), id="offload", marks=SLOW),
    pytest.param(
        Run(LayoutCase(2, OFFLOAD), GPT2, precision="bf16"), id="offload-bf16-plain", marks=SLOW
    ),
    pytest.param(Run(LayoutCase(2, {"context_parallel_size": 2}), GPT2), id="gpt2-cp2", marks=SLOW),
    pytest.param(Run(LayoutCase(1), GPT2, with_schedule=False), id="gpt2-without-schedule"),
]


@pytest.mark.parametrize("run", CASES)
def test_interrupted_and_resumed_equals_uninterrupted(run: Run, tmp_path: Path) -> None:
    num_ranks = run.layout.num_ranks
    folder = str(tmp_path / "checkpoint")

    whole = run_ranks(train, replace(run, save={3: folder}), num_ranks=num_ranks)
    resumed = run_ranks(train, replace(run, load=folder), num_ranks=num_ranks)

    check_equal(whole, resumed, 3)


def test_a_run_saved_after_the_last_batch_of_an_epoch_begins_the_next(tmp_path: Path) -> None:
    run, folder = Run(LayoutCase(2), GPT2), str(tmp_path / "checkpoint")

    whole = run_ranks(train, replace(run, save={5: folder}), num_ranks=2)
    resumed = run_ranks(train, replace(run, load=folder), num_ranks=2)

    check_equal(whole, resumed, 5)


@pytest.mark.slow
def test_a_run_resumed_twice_equals_uninterrupted(tmp_path: Path) -> None:
    run, first, second = Run(LayoutCase(1), GPT2), str(tmp_path / "a"), str(tmp_path / "b")

    whole = run_ranks(train, replace(run, save={2: first}), num_ranks=1)
    run_ranks(train, replace(run, load=first, save={4: second}, steps=4), num_ranks=1)
    resumed = run_ranks(train, replace(run, load=second), num_ranks=1)

    check_equal(whole, resumed, 4)


@pytest.mark.slow
def test_an_offloaded_optimizer_equals_one_that_is_not_and_each_loads_the_other(
    tmp_path: Path,
) -> None:
    plain = Run(LayoutCase(2), GPT2, precision="bf16")
    offloaded = replace(plain, layout=LayoutCase(2, OFFLOAD))
    first, second = str(tmp_path / "plain"), str(tmp_path / "offloaded")

    whole = run_ranks(train, replace(plain, save={3: first}), num_ranks=2)
    check_equal(whole, run_ranks(train, replace(offloaded, save={3: second}), num_ranks=2), 0)
    check_equal(whole, run_ranks(train, replace(offloaded, load=first), num_ranks=2), 3)
    check_equal(whole, run_ranks(train, replace(plain, load=second), num_ranks=2), 3)


def test_saving_changes_nothing_of_the_run(tmp_path: Path) -> None:
    run = Run(LayoutCase(2, DIST), GPT2, steps=4)

    plain = run_ranks(train, run, num_ranks=2)
    saving = run_ranks(
        train, replace(run, save={n: str(tmp_path / str(n)) for n in (1, 2, 3)}), num_ranks=2
    )

    check_equal(plain, saving, 0)


def _hooks(folder: str) -> list[tuple[str, bool]]:
    accelerator, *_ = make(Run(LayoutCase(2)))
    told: list[tuple[str, bool]] = []

    def saving(models: list[Any], weights: list[Any], output_dir: str) -> None:
        told.append(("saved", models == accelerator._models and weights == []))
        if accelerator.is_main_process:
            Path(output_dir, "mine.txt").write_text("kept")

    def loading(models: list[Any], input_dir: str) -> None:
        kept = Path(input_dir, "mine.txt").read_text() == "kept"
        told.append(("loaded", kept and models == accelerator._models))

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(loading)
    if accelerator.process_index == 0:  # on one rank alone, and what it returns cannot be sent
        accelerator.register_save_state_pre_hook(lambda *_: lambda: None)
        accelerator.register_load_state_pre_hook(lambda *_: lambda: None)
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    return told


def test_hooks_run_and_their_files_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    told = run_ranks(_hooks, str(folder), num_ranks=2)

    assert told == [[("saved", True), ("loaded", True)]] * 2
    assert "mine.txt" in json.loads((folder / "manifest.json").read_text())["files"]
