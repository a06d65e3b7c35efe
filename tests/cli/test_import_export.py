"""`import` and `export`: a Hugging Face folder into a checkpoint and back, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.cli import convert_ranks, export, import_, verify
from accelerate_megatron.cli.jobs import parse_with_launcher_flags
from accelerate_megatron.cli.main import main
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples


def on_rank(settings: str) -> None:
    sys.argv = ["convert_ranks", settings]
    convert_ranks.main()


def run_job(module: str, settings: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """Run the job of a command on two ranks, as the launcher would with `flags`."""
    assert module == "accelerate_megatron.cli.convert_ranks"
    assert flags[:2] == ["--tp_degree", "2"]
    folder = Path(settings["output"]).parent
    report = folder / "report.json"
    (folder / "settings.json").write_text(json.dumps({**settings, "report": str(report)}))
    env = {
        "ACCELERATE_USE_CPU": "true",
        "MEGATRON_LM_TP_DEGREE": "2",
        "ACCELERATE_MIXED_PRECISION": flags[flags.index("--mixed_precision") + 1],
    }
    run_ranks(on_rank, str(folder / "settings.json"), num_ranks=2, env=env)
    return json.loads(report.read_text())


@pytest.fixture(autouse=True)
def _jobs_run_on_the_rank_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_, "run_job", run_job)
    monkeypatch.setattr(export, "run_job", run_job)


def check_equal(before: Path, after: Path) -> None:
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[name]) for name, value in old.items())
    for name in ("config.json", "generation_config.json"):
        assert json.loads((before / name).read_text()) == json.loads((after / name).read_text())


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [
        ("qwen3", True, torch.float32),
        ("qwen3", True, torch.bfloat16),
        ("t5", True, torch.float32),
        ("t5", False, torch.float32),
    ],
)
def test_a_folder_comes_back_as_it_was(
    family: str, tied: bool, dtype: torch.dtype, tmp_path: Path, capsys
) -> None:
    model = TinyModel(family, tied=tied).build()
    model.config.dtype = dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.generation_config.max_length = 33
    folder, checkpoint, back = (str(tmp_path / name) for name in ("hf", "checkpoint", "back"))
    model.save_pretrained(folder)

    assert main(["import", folder, "--output", checkpoint, "--tp_degree", "2"]) == 0
    assert main(["export", checkpoint, "--output", back, "--tp_degree", "2"]) == 0

    check_equal(Path(folder), Path(back))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder} -> {checkpoint}: {family}, ")
    assert lines[1].startswith(f"{checkpoint} -> {back}: {family}, ")


def train_and_save(folder: str) -> None:
    """Train in bf16, save the state, and the model in both dtypes."""
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2)
    )
    model = TinyModel("llama").build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(ragged_samples(8), batch_size=2, collate_fn=pad_samples)
    model, _, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        model(**batch)
    accelerator.save_state(f"{folder}/checkpoint")
    model.save_pretrained(f"{folder}/bfloat16")
    model.save_pretrained(f"{folder}/float32", dtype="float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_of_a_bf16_run_gives_either_dtype(dtype: str, tmp_path: Path, capsys) -> None:
    run_ranks(train_and_save, str(tmp_path), num_ranks=1)

    words = ["--output", str(tmp_path / "out"), "--tp_degree", "2", "--json"]
    words += [] if dtype == "bfloat16" else ["--dtype", dtype]
    capsys.readouterr()
    assert main(["export", str(tmp_path / "checkpoint"), *words]) == 0

    check_equal(tmp_path / dtype, tmp_path / "out")
    report = json.loads(capsys.readouterr().out)
    assert (report["model_type"], report["dtype"]) == ("llama", dtype)
    assert report["output"] == str(tmp_path / "out")


def test_with_overwrite_another_model_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    folder, checkpoint, out = (tmp_path / name for name in ("hf", "checkpoint", "out"))
    TinyModel("qwen3").build().save_pretrained(folder)
    TinyModel("gpt2").build().save_pretrained(out)
    for old in (checkpoint, out):
        old.mkdir(exist_ok=True)
        (old / "notes.txt").write_text("kept")

    words = ["--tp_degree", "2", "--overwrite"]
    assert main(["import", str(folder), "--output", str(checkpoint), *words]) == 0
    words += ["--max-shard-size", "200KB"]
    assert main(["export", str(checkpoint), "--output", str(out), *words]) == 0

    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 210_000 for file in files)
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.model_type == "qwen3"
    assert (checkpoint / "notes.txt").read_text() == (out / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize("command", ["import", "export"])
def test_an_output_that_holds_something_is_refused(command: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(SystemExit) as stopped:
        main([command, str(tmp_path), "--output", str(tmp_path)])

    assert stopped.value.code == 2
    assert "the folder is not empty; name another one, or pass --overwrite" in (
        capsys.readouterr().err
    )


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "nothing"), "--output", str(tmp_path / "out")])

    assert "nothing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["CKPT", "--output", "OUT", "--tp_degree", "2", "--cpu"],
        ["--tp_degree", "2", "--cpu", "--output", "OUT", "CKPT"],
        ["--output=OUT", "--tp-degree=2", "CKPT", "--cpu"],
        ["--cpu", "CKPT", "--tp_degree", "2", "--output", "OUT"],
    ],
)
@pytest.mark.parametrize("command", [import_, export, verify])
def test_flags_of_the_launcher_may_stand_before_the_folder(command: Any, words: list[str]) -> None:
    if command is verify:
        words = [word.replace("--output", "--rows").replace("OUT", "5") for word in words]

    args, flags = parse_with_launcher_flags(command._make_parser(), words)

    assert (args.checkpoint if command is export else args.folder) == "CKPT"
    assert (args.rows if command is verify else args.output) == (5 if command is verify else "OUT")
    assert sorted(" ".join(flags).replace("=", " ").replace("-degree", "_degree").split()) == [
        "--cpu",
        "--tp_degree",
        "2",
    ]


def test_a_flag_that_nobody_has_is_refused_by_name(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--tp_degre", "2", str(tmp_path)])

    assert "--tp_degre" in capsys.readouterr().err
