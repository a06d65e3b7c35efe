"""Forty wrong uses: each is answered by an error of ours that names the cure, alike on all ranks.

How each rule works is tested next to its code; here is what a new user does wrong, in one table.
Ranks that die or hang need a whole job: tests/faults/test_jobs.py and docs/faults.md.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from accelerate_megatron import (
    Accelerator,
    FaultPolicy,
    MegatronLMDummyDataLoader,
    MegatronLMPlugin,
)
from accelerate_megatron.cli.command_line import UsageError
from accelerate_megatron.cli.main import main
from accelerate_megatron.errors import (
    BatchError,
    CheckpointError,
    ConfigurationError,
    DataFileError,
    GenerationError,
    RanksDisagreeError,
    TrainingLoopError,
    UnknownFieldError,
    UnsafeCheckpointError,
    UnsupportedError,
    WeightsError,
)
from tests.checkpoint.crafting import Payload, in_metadata, recompute_manifest
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.training.start import TWO_LAYERS, start


@dataclass(frozen=True)
class Wrong:
    """What somebody does, and what has to be the answer."""

    name: str
    do: Callable[..., Any]
    kind: type[Exception]
    cure: str
    """Words of the message that say what to do."""
    ranks: int = 0
    """0: in this process."""


# --- what they do -----------------------------------------------------------------------------


def construct(**plugin: Any) -> None:
    Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))


def construct_unlike_others() -> None:
    construct(num_micro_batches=1 + dist.get_rank())


def read_word_of_environment() -> None:
    os.environ["MEGATRON_LM_SEQUENCE_PARALLELISM"] = "maybe"
    Accelerator(cpu=True)


def with_arguments(arguments: Any) -> None:
    MegatronLMPlugin(other_megatron_args=arguments)


def command(*words: str) -> None:
    """Run a command; what it says about its line becomes an error again."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = main(words)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    assert status in (1, 2), f"status {status}: {said.getvalue()}"
    raise UsageError(said.getvalue())


def prepare(recipe: TinyModel = TWO_LAYERS, **plugin: Any) -> None:
    start(recipe, **plugin)


def prepare_with(make: Callable[[Any], tuple[Any, ...]], **options: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*make(TWO_LAYERS.build()), **options)


def torch_scheduler(model: Any) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def odd_optimizer(model: Any) -> tuple[Any, ...]:
    return model, torch.optim.Adagrad(model.parameters())


def optimizer_of_another_model(model: Any) -> tuple[Any, ...]:
    return model, torch.optim.SGD(TWO_LAYERS.build().parameters(), lr=0.1)


def model_alone(model: Any) -> tuple[Any, ...]:
    return (model,)


def unknown_model(_model: Any) -> tuple[Any, ...]:
    config = GPTNeoXConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return (GPTNeoXForCausalLM(config),)


def no_transformers_model(_model: Any) -> tuple[Any, ...]:
    return (torch.nn.Linear(4, 4),)


def indexed_data(model: Any, **data: Any) -> tuple[Any, ...]:
    dummy = MegatronLMDummyDataLoader(**{"seq_length": 8, "micro_batch_size": 1, **data})
    return model, torch.optim.SGD(model.parameters(), lr=0.1), dummy, dummy, dummy


def call(method: str, *args: Any) -> None:
    getattr(start().accelerator, method)(*args)


def backward_of_another_loss() -> None:
    started = start()
    loss = started.model(**next(iter(started.loader))).loss
    started.accelerator.backward(loss * 2)


def clip_elsewhere() -> None:
    started = start()
    started.model(**next(iter(started.loader)))
    started.accelerator.clip_grad_norm_(started.model.parameters(), 7.0)


def train_without_optimizer() -> None:
    model = Accelerator(cpu=True).prepare(TWO_LAYERS.build())
    model.train()
    model(input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long))


def step_with(**batch: Any) -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    start().model(
        **{
            name: tensor
            for name, tensor in {"input_ids": ids, "labels": ids, **batch}.items()
            if tensor is not None
        }
    )


def generate(**settings: Any) -> None:
    start().model.megatron_generate(torch.ones(1, 4, dtype=torch.long), **settings)


def load_pickle() -> None:
    accelerator = start().accelerator
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(accelerator.save_state(f"{folder}/checkpoint"))
        in_metadata(checkpoint, Payload(checkpoint / "ran"))
        recompute_manifest(checkpoint)
        accelerator.load_state(checkpoint)


# --- the table --------------------------------------------------------------------------------

CONFIG, USAGE = ConfigurationError, UsageError
PLUGIN = MegatronLMPlugin
FOUR_HEADS = TinyModel("gpt2", changes={"n_layer": 2, "n_head": 3, "n_embd": 48})
THREE_LAYERS = TinyModel("gpt2", changes={"n_layer": 3})
LONG = torch.ones(2, 70, dtype=torch.long)

WRONG = [
    # fields of the plugin
    Wrong("typo", partial(PLUGIN, tp_degre=2), UnknownFieldError, "did you mean tp_degree"),
    Wrong("other-name", partial(PLUGIN, tp_size=2), UnknownFieldError, "it is tp_degree"),
    Wrong("word", partial(PLUGIN, tp_degree="two"), CONFIG, "it must be a whole number"),
    Wrong("negative", partial(PLUGIN, gradient_clipping=-1), CONFIG, "it must be at least 0"),
    Wrong("dropout", partial(PLUGIN, hidden_dropout=2), CONFIG, "it must be in [0, 1]"),
    Wrong("two-lengths", partial(PLUGIN, train_iters=1, train_samples=1), CONFIG, "at most one of"),
    Wrong("style", partial(PLUGIN, lr_decay_style="fast"), CONFIG, "must be one of constant"),
    Wrong("flash", partial(PLUGIN, attention_backend="flash"), CONFIG, "Leave it out"),
    Wrong("decay", partial(PLUGIN, weight_decay_incr_style="linear"), CONFIG, "it needs both"),
    Wrong("lr-mult", partial(PLUGIN, lr_mult=2.0), CONFIG, "Give both, or neither"),
    Wrong("environment", read_word_of_environment, CONFIG, "must be one of true", 1),
    Wrong(
        "argument-typo",
        partial(with_arguments, {"clip_gard": 1}),
        UnknownFieldError,
        "did you mean clip",
    ),
    Wrong(
        "argument",
        partial(with_arguments, {"lr": 1.0}),
        UnsupportedError,
        "optimizer given to prepare",
    ),
    Wrong("flags", partial(with_arguments, "--lr 1"), CONFIG, "it must be a dictionary"),
    Wrong("policy", partial(FaultPolicy, non_finite="go on"), CONFIG, "one of stop, skip"),
    # command lines
    Wrong("command", partial(command, "lunch"), USAGE, "did you mean launch"),
    Wrong("flag", partial(command, "launch", "--tp_degre", "2", "x.py"), USAGE, "did you mean"),
    Wrong("script", partial(command, "launch", "nowhere.py"), USAGE, "nowhere.py: no such file"),
    Wrong(
        "ranks",
        partial(command, "launch", "--num_processes", "6", "--tp_degree", "4", __file__),
        USAGE,
        "it must be a multiple of tp_degree=4 = 4, such as 4 or 8",
    ),
    Wrong(
        "machines",
        partial(command, "launch", "--num_machines", "2", __file__),
        USAGE,
        "needs --main_process_ip: the address of machine 0",
    ),
    Wrong(
        "no-config",
        partial(command, "launch", "--config_file", "no.yaml", __file__),
        USAGE,
        "no.yaml",
    ),
    Wrong("plan", partial(command, "plan", "nowhere", "--devices", "8"), USAGE, "config.json"),
    Wrong("verify", partial(command, "verify", "nowhere"), USAGE, "name the folder of a"),
    Wrong("ckpt", partial(command, "ckpt", "validate", "nowhere"), USAGE, "nowhere"),
    Wrong("generate", partial(command, "generate", "nowhere", "--prompt", "x"), USAGE, "nowhere"),
    Wrong("doctor", partial(command, "doctor", "--folder", "nowhere"), USAGE, "name one that is"),
    # what prepare is given
    Wrong(
        "scheduler",
        partial(prepare_with, torch_scheduler),
        UnsupportedError,
        "Pass MegatronLMDummyScheduler(",
        1,
    ),
    Wrong("optimizer", partial(prepare_with, odd_optimizer), UnsupportedError, "Megatron runs", 1),
    Wrong(
        "foreign-optimizer",
        partial(prepare_with, optimizer_of_another_model),
        CONFIG,
        "Give them to the",
        1,
    ),
    Wrong("model-type", partial(prepare_with, unknown_model), UnsupportedError, "supported are", 1),
    Wrong(
        "no-model",
        partial(prepare_with, no_transformers_model),
        UnsupportedError,
        "give prepare a transformers model",
        1,
    ),
    Wrong(
        "weights",
        partial(prepare_with, model_alone, weights="nowhere"),
        WeightsError,
        "name the folder of a",
        1,
    ),
    Wrong(
        "no-data",
        partial(prepare_with, partial(indexed_data, data_path="nowhere")),
        DataFileError,
        "nowhere",
        1,
    ),
    Wrong("no-path", partial(prepare_with, indexed_data), CONFIG, "needs data_path", 1),
    Wrong("length", partial(prepare, seq_length=65), CONFIG, "set seq_length to 64 or less", 1),
    # the loop
    Wrong(
        "prepare-model", partial(call, "prepare_model", None), UnsupportedError, "Call prepare(", 1
    ),
    Wrong(
        "no-sync",
        partial(call, "no_sync", None),
        UnsupportedError,
        "Set MegatronLMPlugin(num_micro",
        1,
    ),
    Wrong("backward", backward_of_another_loss, TrainingLoopError, "custom_loss_function", 1),
    Wrong("clip", clip_elsewhere, TrainingLoopError, "gradient_clipping", 1),
    Wrong("no-optimizer", train_without_optimizer, TrainingLoopError, "prepare", 1),
    Wrong("no-labels", partial(step_with, labels=None), BatchError, "Let the collate_fn add it", 1),
    Wrong(
        "ids",
        partial(step_with, input_ids=LONG[:, :8] * 99),
        BatchError,
        "resize_token_embeddings",
        1,
    ),
    Wrong("long", partial(step_with, input_ids=LONG, labels=LONG), BatchError, "truncation", 1),
    Wrong(
        "floats",
        partial(step_with, input_ids=LONG[:, :8] * 1.0),
        BatchError,
        "it has to hold integers",
        1,
    ),
    Wrong("generation", partial(generate, max_new_tokens=0), GenerationError, "it must be", 1),
    # checkpoints
    Wrong("no-checkpoint", partial(call, "load_state", "nowhere"), CheckpointError, "nowhere", 1),
    Wrong(
        "no-folder",
        partial(call, "save_state"),
        CONFIG,
        "save_state was called without output_dir; give",
        1,
    ),
    Wrong("pickle", load_pickle, UnsafeCheckpointError, ".metadata", 1),
    # ranks
    Wrong("world", partial(construct, tp_degree=2), CONFIG, "3 ranks cannot hold tp_degree=2", 3),
    Wrong(
        "sp", partial(construct, sequence_parallelism=True), CONFIG, "Set tp_degree to 2 or more", 1
    ),
    Wrong("heads", partial(prepare, FOUR_HEADS, tp_degree=2), CONFIG, "tp_degree can be 1", 2),
    Wrong("layers", partial(prepare, THREE_LAYERS, pp_degree=2), CONFIG, "pp_degree can be 1", 2),
    Wrong(
        "unlike", construct_unlike_others, RanksDisagreeError, "num_micro_batches is 1 on rank 0", 2
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_use_is_answered_with_its_cure(wrong: Wrong) -> None:
    if wrong.ranks:
        errors = run_ranks(wrong.do, num_ranks=wrong.ranks, errors="return")
    else:
        with pytest.raises(wrong.kind) as raised:
            wrong.do()
        errors = [raised.value]

    assert [type(error) for error in errors] == [wrong.kind] * max(1, wrong.ranks)
    assert len({str(error) for error in errors}) == 1
    assert wrong.cure in str(errors[0])


def test_there_are_forty() -> None:
    assert len({wrong.name for wrong in WRONG}) == len(WRONG) >= 40


@pytest.mark.slow
def test_megatron_imported_too_early_is_answered_with_its_cure() -> None:
    """Without CUDA, Megatron-Core has to be rewritten while it is imported."""
    code = "import megatron.core.parallel_state\n"
    code += "from accelerate_megatron import Accelerator\nAccelerator(cpu=True)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "EngineError" in done.stderr
    assert "before" in done.stderr.splitlines()[-1]
