"""`benchmarks/train_step.py` at its smallest: all sides, in turn, on the same thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_sides_train_the_same_model() -> None:
    cases = ["gpt2-tiny-fp32", "llama-tiny-fp32-tp2"]
    job = subprocess.run(
        [sys.executable, BENCHMARKS / "train_step.py", "--pairs=1", "--cases", *cases],
        check=False,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    lines = [json.loads(line) for line in job.stdout.splitlines()]

    sides = [(line["case"], line["peer"]) for line in lines]
    assert sides == [
        (cases[0], "hf-as-run"),
        (cases[0], "hf-same-settings"),
        (cases[1], "one-process"),
    ]
    for line in lines:
        assert len(line["ours_step_s"]) == len(line["peer_step_s"]) == 5
        # fp32, seven updates of AdamW: the sums are only in another order.
        assert line["largest_loss_difference"] < 1e-4
        assert line["ours_parameters"] == line["peer_parameters"] == "float32"
    assert lines[0]["peer_options"] == {}
    assert set(lines[1]["peer_options"]) == {"attention", "fused_adamw", "matmul_precision"}


def test_the_page_says_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import performance_page

    monkeypatch.setattr(sys, "argv", ["performance_page.py", "--check"])

    assert performance_page.main() == 0


def test_a_table_has_the_middle_and_the_reach_of_the_ratios(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import performance_page

    line = {
        "ours_step_s": [2.0, 1.0, 1.5],
        "limit_gflops": 200.0,
        "ours_gflops": 100.0,
        "date": "2026-01-01",
        "machine": "2 cores of a CPU",
        "versions": {"torch": "2"},
    }
    cases = {"a": {"hf-same-settings": [{**line, "ratio": ratio} for ratio in (1.2, 1.1, 1.6)]}}

    table = performance_page.steps(cases)

    assert "| `a` | 1.50 | 1.20 (1.10 to 1.60) |  |  | 0.50 |" in table
    assert "2 cores of a CPU" in table
