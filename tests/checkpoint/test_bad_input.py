"""What cannot be loaded is refused before anything is changed, and says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
    UnsupportedError,
)
from tests.checkpoint.tensors import data_folder
from tests.checkpoint.training import Run, make, train
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer
from tests.parity.training import LayoutCase

UNTIED = TinyModel("llama", tied=False)
Load = Callable[..., list[Any]]


def test_a_missing_folder_is_no_fresh_start(tmp_path: Path, load: Load) -> None:
    errors = load(tmp_path / "nowhere", Run(LayoutCase(2)))

    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "nowhere: there is no such folder, so nothing can be loaded" in str(error)


def test_an_empty_folder_is_no_fresh_start(tmp_path: Path, load: Load) -> None:
    [error] = load(tmp_path)

    assert isinstance(error, CheckpointError)
    assert "holds no complete checkpoint: it has no manifest.json. It is empty." in str(error)


def test_a_folder_of_checkpoints_names_those_in_it(saved: Path, load: Load) -> None:
    [error] = load(saved.parent)

    assert isinstance(error, CheckpointError)
    assert "It holds checkpoints: give one of them (checkpoint)." in str(error)


def test_another_model_is_refused_key_by_key(saved: Path, load: Load) -> None:
    [error] = load(saved, Run(model=TinyModel("gpt2", changes={"n_layer": 3, "n_inner": 96})))

    assert isinstance(error, CheckpointMismatchError)
    assert "num_layers is 3 here and 4 in the checkpoint" in str(error)
    assert "decoder.layers.0.mlp.linear_fc1.bias: [96] here, [256] in the checkpoint" in str(error)
    assert "and " in str(error)
    assert " more" in str(error)


def test_another_family_is_refused(saved: Path, load: Load) -> None:
    [error] = load(saved, Run(model=TinyModel("llama")))

    assert isinstance(error, CheckpointMismatchError)
    assert "model_type is 'llama' here and 'gpt2' in the checkpoint" in str(error)


def test_another_kind_of_optimizer_is_refused(saved: Path, load: Load) -> None:
    sgd = TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9})
    [error] = load(saved, Run(optimizer=sgd))

    assert isinstance(error, CheckpointMismatchError)
    assert "momentum_buffer.decoder" in str(error)
    assert "here, not in the checkpoint" in str(error)


def test_a_newer_format_is_refused(copied: Path, load: Load) -> None:
    path = copied / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 7}))

    [error] = load(copied)

    assert isinstance(error, CheckpointError)
    assert "has format version 7; this version of accelerate-megatron reads up to 1" in str(error)


def test_weights_alone_do_not_pass_for_a_whole_state(tmp_path: Path, load: Load) -> None:
    folder = str(tmp_path / "weights")
    run = Run(plugin={"no_save_optim": True}, steps=2, save={2: folder})
    run_ranks(train, run, num_ranks=1)

    [error] = load(folder)

    assert isinstance(error, CheckpointMismatchError)
    assert "weights only (saved with no_save_optim)" in str(error)
    assert "no_load_optim=True" in str(error)


def _load_without_optimizer(folder: str, precision: str) -> tuple[Any, ...]:
    run = Run(LayoutCase(2, {"use_distributed_optimizer": True}), precision=precision)
    accelerator, model, optimizer, loader, _ = make(replace(run, plugin={"no_load_optim": True}))
    accelerator.load_state(folder)
    [part] = optimizer.session.optimizer.chained_optimizers
    moments = [value for kept in part.optimizer.state.values() for value in kept.values()]
    has_moments = any(bool(value.any()) for value in moments)
    rate = optimizer.param_groups[0]["lr"]
    model.train()
    model(**next(iter(loader)))
    return accelerator.get_state_dict(model), rate, has_moments


@pytest.mark.parametrize(
    ("precision", "has_optimizer"),
    [("no", True), ("no", False), ("bf16", False)],
    ids=["whole", "weights", "weights-bf16"],
)
def test_no_load_optim_takes_the_weights_and_starts_the_optimizer_anew(
    precision: str, has_optimizer: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "weights")
    plugin = {"no_save_optim": not has_optimizer}
    run = Run(plugin=plugin, precision=precision, steps=2, save={2: folder})
    [saved] = run_ranks(train, run, num_ranks=1)

    _, (weights, rate, has_moments) = run_ranks(
        _load_without_optimizer, folder, precision, num_ranks=2
    )

    assert not has_moments
    # The first update of the schedule has rate 0: it writes what the optimizer took for the
    # weights, which must be those that were loaded and not those the model was built with.
    assert rate == 0.0
    for name, weight in saved.weights.items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("name", ["tensors/__0_0.distcp", "run.json", "ranks/00000.json"])
def test_a_truncated_file_is_named_before_anything_is_loaded(
    name: str, copied: Path, load: Load
) -> None:
    path = data_folder(copied) / name
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 1)

    errors = load(copied, Run(LayoutCase(2)))

    for error in errors:
        assert isinstance(error, CheckpointError)
        assert f"{name} has {size - 1} bytes and should have {size}" in str(error)


@pytest.mark.parametrize("name", ["tensors/__0_0.distcp", "tensors/.metadata", "run.json"])
def test_a_flipped_bit_is_named_before_anything_is_loaded(
    name: str, copied: Path, load: Load
) -> None:
    path = data_folder(copied) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    [error] = load(copied)

    assert isinstance(error, CheckpointError)
    assert f"{name} has changed since it was written" in str(error)


def test_a_missing_file_is_named(copied: Path, load: Load) -> None:
    (data_folder(copied) / "tensors/__0_0.distcp").unlink()

    [error] = load(copied)

    assert "tensors/__0_0.distcp is missing" in str(error)


def _call_fully_sharded(folder: str) -> list[str]:
    accelerator, *_ = make(Run(LayoutCase(2, {"use_custom_fsdp": True}), UNTIED))
    told = []
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(UnsupportedError) as refusal:
            call(folder)
        told.append(str(refusal.value))
    return told


def test_fully_sharded_parameters_are_neither_saved_nor_loaded(copied: Path) -> None:
    before = sorted(copied.rglob("*"))

    ranks = run_ranks(_call_fully_sharded, str(copied), num_ranks=2)

    assert ranks[0] == ranks[1]
    for told in ranks[0]:
        assert "cannot be used with use_custom_fsdp" in told
        assert "use_distributed_optimizer" in told
    assert sorted(copied.rglob("*")) == before


def test_another_global_batch_in_mid_epoch_is_refused(copied: Path, load: Load) -> None:
    [error] = load(copied, Run(LayoutCase(1, num_micro_batches=3)))

    assert "no multiple of the" in str(error)


def _register_nothing(folder: str) -> None:
    accelerator, *_ = make(Run())
    accelerator._custom_objects.clear()
    accelerator.load_state(folder)


def test_registered_objects_must_be_the_same(saved: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="states of 1 registered objects, and 0"):
        run_ranks(_register_nothing, str(saved), num_ranks=1)


class _Unsafe:
    def state_dict(self) -> dict[str, Any]:
        return {"rate": Fraction(1, 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def _register_unsafe(folder: str) -> None:
    accelerator, *_ = make(Run())
    accelerator.register_for_checkpointing(_Unsafe())
    accelerator.save_state(folder)


def test_an_object_that_could_not_be_loaded_safely_is_refused_when_saving(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    with pytest.raises(CheckpointError, match=r"registered _Unsafe cannot be loaded safely"):
        run_ranks(_register_unsafe, str(folder), num_ranks=1)

    assert not folder.exists()
    assert not [path for path in tmp_path.iterdir() if "saving" in path.name]


def _call(method: str, kwargs: dict[str, Any]) -> None:
    accelerator, *_ = make(Run())
    getattr(accelerator, method)(**kwargs)


@pytest.mark.parametrize(
    ("method", "kwargs", "message"),
    [
        ("save_state", {}, "save_state was called without output_dir"),
        ("save_state", {"output_dir": "x", "safe_serialization": False}, "always safe to load"),
        ("load_state", {}, "load_state was called without a folder and no project_dir"),
        ("load_state", {"input_dir": "x", "strict": False}, "does not read strict"),
    ],
)
def test_calls_without_meaning_are_refused(
    method: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_ranks(_call, method, kwargs, num_ranks=1)
