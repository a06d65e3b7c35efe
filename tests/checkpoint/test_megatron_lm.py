"""Checkpoints in Megatron-LM's own layout, written by Megatron-Core: the same model goes on."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron.checkpoint.megatron_lm import argument_differences
from accelerate_megatron.cli.main import main
from accelerate_megatron.errors import (
    CheckpointError,
    CheckpointMismatchError,
    UnsafeCheckpointError,
)
from accelerate_megatron.models.llama import llama_shape
from tests.checkpoint.crafting import Payload
from tests.checkpoint.training import Run, make
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.parity.training import LayoutCase

LLAMA = TinyModel("llama", tied=False)
GPT2 = TinyModel("gpt2")
OTHER_SEED = 77
ARGS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "params_dtype": torch.float32,
}


def _write(run: Run, folder: str, args: dict[str, Any], stacked: bool) -> dict[str, Any] | None:
    """Write what Megatron-LM's `save_checkpoint` does, with Megatron-Core's own functions."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.transformer.enums import AttnBackend

    from accelerate_megatron.engine.wrapping import innermost

    accelerator, model, *_ = make(run)
    [chunk] = model.session.chunks
    state = {
        "args": argparse.Namespace(attention_backend=AttnBackend.auto, **args),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": innermost(chunk).sharded_state_dict(
            metadata={
                "non_homogeneous_layers": not stacked,
                "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            }
        ),
    }
    target = Path(folder, "iter_0000010")
    if accelerator.process_index == 0:
        target.mkdir(parents=True)
        Path(folder, "latest_checkpointed_iteration.txt").write_text("10")
    accelerator.wait_for_everyone()
    dist_checkpointing.save(state, str(target), ("torch_dist", 1))
    return accelerator.get_state_dict(model)


def _load(run: Run, folder: str, loads_optimizer: bool = False) -> tuple[Any, int]:
    changed = replace(run, plugin={**run.plugin, "no_load_optim": not loads_optimizer})
    accelerator, model, *_ = make(changed)
    accelerator.load_state(folder)
    return accelerator.get_state_dict(model), model.session.num_updates


def with_other_weights(run: Run, layout: LayoutCase) -> Run:
    return replace(run, layout=layout, model=replace(run.model, seed=OTHER_SEED))


@pytest.mark.parametrize(
    ("run", "layout", "stacked", "args"),
    [
        pytest.param(
            Run(LayoutCase(2, {"tp_degree": 2}), LLAMA),
            LayoutCase(2, {"pp_degree": 2}, 4),
            True,
            ARGS,
            id="llama-tp2-stacked-to-pp2",
        ),
        pytest.param(
            Run(LayoutCase(1), GPT2),
            LayoutCase(2, {"tp_degree": 2}),
            False,
            {"num_layers": 4, "normalization": "LayerNorm"},
            id="gpt2-to-tp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Run(LayoutCase(1), TinyModel("mixtral", tied=False)),
            LayoutCase(2, {"expert_model_parallel_size": 2}),
            True,
            {"num_layers": 4},
            id="mixtral-stacked-to-ep2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_that_megatron_lm_wrote_are_loaded_in_another_layout(
    run: Run, layout: LayoutCase, stacked: bool, args: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "megatron-lm")
    wanted = run_ranks(_write, run, folder, args, stacked, num_ranks=run.layout.num_ranks)[-1]

    weights, updates = run_ranks(
        _load, with_other_weights(run, layout), folder, num_ranks=layout.num_ranks
    )[-1]

    assert updates == 10
    assert set(weights) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(weights[name], value), name


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a Llama on one rank. Not to be changed."""
    folder = tmp_path_factory.mktemp("megatron-lm") / "save"
    run_ranks(_write, Run(model=LLAMA), str(folder), ARGS, True, num_ranks=1)
    return folder


def _error(folder: Path, model: TinyModel = LLAMA, loads_optimizer: bool = False) -> Any:
    run = Run(model=model)
    [error] = run_ranks(_load, run, str(folder), loads_optimizer, num_ranks=1, errors="return")
    return error


@pytest.mark.slow
def test_another_model_is_refused_by_argument_and_key(written: Path) -> None:
    error = _error(written, TinyModel("llama", tied=False, changes={"num_hidden_layers": 2}))

    assert isinstance(error, CheckpointMismatchError)
    assert "num_layers is 2 here and 4 in the checkpoint" in str(error)
    assert "decoder.layers.mlp.linear_fc2.weight: [2, 64, 128] here, [4, 64, 128]" in str(error)


@pytest.mark.slow
def test_its_optimizer_is_refused_with_what_works_instead(written: Path) -> None:
    error = _error(written, loads_optimizer=True)

    assert isinstance(error, CheckpointMismatchError)
    assert "no_load_optim=True" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["common.pt", ".metadata"])
def test_a_payload_does_not_run(file: str, written: Path, tmp_path: Path) -> None:
    folder, flag = tmp_path / "save", tmp_path / "it-ran"
    shutil.copytree(written, folder)
    path = folder / "iter_0000010" / file
    if file == "common.pt":
        common = {"iteration": 10, "args": argparse.Namespace(x=Payload(flag))}
        torch.save(common, path)
    else:
        path.write_bytes(pickle.dumps(Payload(flag)))

    error = _error(folder)

    assert isinstance(error, UnsafeCheckpointError)
    assert not flag.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [("tracker", "must be the number of an iteration"), ("format", "torch_dist")],
)
def test_what_is_no_checkpoint_is_refused(
    damage: str, message: str, written: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "save"
    shutil.copytree(written, folder)
    if damage == "tracker":
        (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    else:
        (folder / "iter_0000010/metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))

    error = _error(folder)

    assert isinstance(error, CheckpointError)
    assert message in str(error)


def test_the_command_shows_what_is_in_it(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["inspect", written], ["inspect", written / "iter_0000010"], ["list", written]):
        assert main(["ckpt", *map(str, words), "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert main(["ckpt", "validate", str(written)]) == 0
    assert main(["ckpt", "inspect", str(written)]) == 0
    text = capsys.readouterr().out

    facts, same, listed = shown
    assert same == facts
    assert (facts["step"], facts["has_optimizer"]) == (10, False)
    assert facts["run"]["args"] == {k: v for k, v in ARGS.items() if k != "params_dtype"}
    [weight] = [t for t in facts["tensors"] if t["name"] == "decoder.layers.mlp.linear_fc2.weight"]
    assert weight == {
        **weight,
        "shape": [4, 64, 128],
        "dtype": "float32",
        "bytes": 4 * 64 * 128 * 4,
    }
    [entry] = listed["checkpoints"]
    assert (entry["name"], entry["step"], entry["problem"]) == ("iter_0000010", 10, None)
    assert entry["bytes"] == facts["bytes"] > weight["bytes"]
    assert "keeps no checksums" in text
    assert "decoder.layers.mlp.linear_fc2.weight" in text


@pytest.mark.parametrize("command", ["inspect", "validate", "list"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [("truncate", "bytes and should have"), (".metadata", "code"), ("common.pt", "code")],
)
def test_the_command_refuses_what_is_damaged_or_unsafe(
    damage: str,
    message: str,
    command: str,
    written: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, flag = tmp_path / "save", tmp_path / "it-ran"
    shutil.copytree(written, folder)
    iteration = folder / "iter_0000010"
    if damage == "truncate":
        [file, *_] = sorted(iteration.glob("*.distcp"), key=lambda path: -path.stat().st_size)
        with open(file, "r+b") as opened:
            opened.truncate(file.stat().st_size - 1)
    elif damage == "common.pt":
        torch.save(
            {"iteration": 10, "args": argparse.Namespace(x=Payload(flag))}, iteration / damage
        )
    else:
        (iteration / damage).write_bytes(pickle.dumps(Payload(flag)))

    status = main(["ckpt", command, str(folder), "--json"])

    told = json.loads(capsys.readouterr().out)
    problem = told["checkpoints"][0]["problem"] if command == "list" else told["problems"][0]
    assert message in problem
    assert status == (0 if command == "list" else 1)
    assert not flag.exists()


def test_arguments_that_change_the_model_are_compared() -> None:
    shape = llama_shape(LLAMA.config())

    assert argument_differences(argparse.Namespace(**ARGS), shape) == []
    assert argument_differences(None, shape) == []
    changed = argparse.Namespace(**{**ARGS, "rotary_base": 500000, "swiglu": False})
    assert argument_differences(changed, shape) == [
        "swiglu is True here and False in the checkpoint",
        "rotary_base is 10000.0 here and 500000 in the checkpoint",
    ]
