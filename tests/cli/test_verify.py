"""`verify` compares whole models, and says where they differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron.cli import verify, verify_ranks
from accelerate_megatron.cli.main import main
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel

REPORT = {
    "folder": "there",
    "model_type": "llama",
    "layout": {"tp": 2, "pp": 1, "dp": 1},
    "compared": "logits",
    "num_values": 99,
    "num_places": 6,
    "tokens": [[5, 6, 7], [8, 9, 10]],
    "largest_logit": 4.0,
    "largest_difference": 3e-5,
    "same_best": 6,
    "differences": [[0.0, 1e-5, 2e-5], [3e-5, 0.0, 0.0]],
}


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, report: Any) -> list[Any]:
    """Call the command with a job that reports `report`; return what the job was given."""
    given: list[Any] = []

    def run_job(*args: Any) -> Any:
        given.append(args)
        return report and json.loads(json.dumps(report))

    monkeypatch.setattr(verify, "run_job", run_job)
    given.append(main(["verify", *words]))
    return given


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_within_the_tolerance_it_says_equal(folder, monkeypatch, capsys) -> None:
    job, status = run([folder, "--tp_degree", "2", "--length", "3"], monkeypatch, REPORT)

    assert status == 0
    assert capsys.readouterr().out.splitlines() == [
        "there: llama, float32, tp 2, pp 1, dp 1",
        "2 x 3 tokens, 99 logits each",
        "largest logit       4",
        "largest difference  3.000e-05 (limit 4.000e-05)",
        "same best token     6 of 6",
        "equal",
    ]
    assert job == (
        "accelerate_megatron.cli.verify_ranks",
        {"folder": folder, "rows": 2, "length": 3, "seed": 0},
        ["--tp_degree", "2", "--mixed_precision", "no"],
    )


def test_beyond_the_tolerance_it_names_the_first_token_and_fails(
    folder, monkeypatch, capsys
) -> None:
    _, status = run([folder, "--tolerance", "2.6e-6"], monkeypatch, REPORT)

    assert status == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "DIFFERENT, first at row 0, position 2 (token 7): 2.000e-05"
    )


def test_not_a_number_is_a_difference(folder, monkeypatch, capsys) -> None:
    report = {**REPORT, "differences": [[0.0, float("nan"), 0.0], [0.0, 0.0, 0.0]]}

    _, status = run([folder, "--json"], monkeypatch, report)

    assert status == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    assert (found["first"]["row"], found["first"]["position"]) == (0, 1)


def test_a_job_that_failed_fails_the_command(folder, monkeypatch, capsys) -> None:
    assert run([folder], monkeypatch, None)[-1] == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--rows", "0"], "--rows 0: it must be at least 1", id="rows"),
        pytest.param(["--tolerance", "-1"], "--tolerance -1.0: it cannot be negative", id="minus"),
        pytest.param(["--tp_degre", "2"], "--tp_degre: no such flag; did you mean", id="typo"),
        pytest.param(["other"], "other: one argument too many", id="stray"),
        pytest.param(["--mixed-precision=bf16"], "is told by --dtype", id="precision"),
    ],
)
def test_misuse_is_explained(words, message, folder, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", folder, *words])

    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_config_is_refused(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path)])

    assert "holds no config.json" in capsys.readouterr().err


def on_rank(settings: str) -> None:
    sys.argv = ["verify_ranks", settings]
    verify_ranks.main()


def test_the_ranks_compare_the_logits_of_both_models(tmp_path: Path) -> None:
    TinyModel("qwen2", changes={"vocab_size": 101}).build().save_pretrained(tmp_path)
    settings = {"folder": str(tmp_path), "rows": 2, "length": 9, "seed": 3}
    settings["report"] = str(tmp_path / "report.json")
    (tmp_path / "settings.json").write_text(json.dumps(settings))

    run_ranks(
        on_rank,
        str(tmp_path / "settings.json"),
        num_ranks=2,
        env={"ACCELERATE_USE_CPU": "true", "MEGATRON_LM_PP_DEGREE": "2"},
    )

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["layout"] == {"tp": 1, "pp": 2, "dp": 1}
    assert (len(report["tokens"]), len(report["tokens"][0])) == (2, 9)
    assert verify.judge(report, tolerance=1e-5, dtype="float32")["equal"]


def test_the_largest_difference_of_each_token_is_found() -> None:
    wanted = torch.zeros(1, 2, 3)
    ours = torch.tensor([[[0.0, 0.5, -1.0], [2.0, 0.0, 0.0]]])

    report = verify_ranks.compare(ours, wanted)

    assert report["differences"] == [[1.0, 2.0]]
    assert report["largest_difference"] == 2.0
    assert report["same_best"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_itself_runs_the_ranks(tmp_path: Path) -> None:
    TinyModel("mistral", tied=False, changes={"sliding_window": 7}).build().save_pretrained(
        tmp_path
    )

    words = ["verify", str(tmp_path), "--cpu", "--tp_degree", "2", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_megatron", *words],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines()[-1] == "equal"
