"""`benchmarks/train_step.py` at its smallest: both sides, in turn, on the same thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "train_step.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words", [["--tp_degree", "2"], ["--pp_degree=2", "--num_micro_batches=2"]]
)
def test_both_sides_take_turns_and_train_the_same_model(words):
    job = subprocess.run(
        [
            sys.executable,
            BENCHMARK,
            "--size=tiny",
            "--dtype=fp32",
            "--ranks=2",
            "--pairs=2",
            *words,
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    *turns, summary = [json.loads(line) for line in job.stdout.splitlines()]

    ours, other = "accelerate-megatron", "accelerate"
    assert [turn["side"] for turn in turns] == [ours, other, other, ours]
    assert {turn["threads"] for turn in turns} == {summary["threads"]}
    assert all(len(turn["step_seconds"]) == 5 for turn in turns)
    assert len(summary["speedup_of_each_pair"]) == 2
    # fp32, seven updates of AdamW: the sums are only in another order.
    assert summary["largest_loss_difference"] < 1e-4
