"""`accelerate-megatron ckpt`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelerate_megatron.cli.main import main
from tests.checkpoint import crafting
from tests.checkpoint.crafting import Payload
from tests.checkpoint.tensors import data_folder


def test_inspect_shows_the_run_and_every_tensor(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "inspect", str(saved), "--json"]) == 0

    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 2
    assert facts["run"]["model"]["num_layers"] == 4
    assert facts["run"]["layout"]["tp_size"] == 1
    tensors = {tensor["name"]: tensor for tensor in facts["tensors"]}
    weight = tensors["decoder.layers.3.mlp.linear_fc1.weight"]
    assert weight == {**weight, "shape": [256, 64], "dtype": "float32", "bytes": 256 * 64 * 4}
    assert "optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc1.weight" in tensors


def test_inspect_as_text(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", str(saved)]) == 0

    out = capsys.readouterr().out
    assert "step           2" in out
    assert "decoder.final_layernorm.weight" in out


def test_validate_accepts_a_good_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "validate", str(saved)]) == 0

    assert "all good" in capsys.readouterr().out


def test_validate_names_every_damaged_file(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data_folder(copied) / "run.json").write_text("{}")
    (data_folder(copied) / "tensors/__0_0.distcp").unlink()

    assert main(["ckpt", "validate", str(copied), "--json"]) == 1

    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) == 2
    assert "run.json has 2 bytes" in problems[0]
    assert "__0_0.distcp is missing" in problems[1]


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_a_payload_is_refused_and_does_not_run(
    command: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "it-ran"
    crafting.in_metadata(copied, Payload(flag))
    crafting.recompute_manifest(copied)

    assert main(["ckpt", command, str(copied), "--json"]) == 1

    assert "could run code" in json.loads(capsys.readouterr().out)["problems"][0]
    assert not flag.exists()


def test_list_shows_checkpoints_and_what_was_interrupted(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied.parent / ".checkpoint.saving-0123456789abcdef").mkdir()
    damaged = copied.parent / "other"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("")

    assert main(["ckpt", "list", str(copied.parent), "--json"]) == 0

    facts = json.loads(capsys.readouterr().out)
    listed = {entry["name"]: entry for entry in facts["checkpoints"]}
    assert listed["checkpoint"]["step"] == 2
    assert "cannot be read" in listed["other"]["problem"]
    assert facts["unfinished"] == [".checkpoint.saving-0123456789abcdef"]


def test_a_missing_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", str(tmp_path / "nowhere")]) == 1

    assert "there is no such folder" in capsys.readouterr().err
