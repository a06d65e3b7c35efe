"""The benchmark of two stages against two tensor-parallel ranks runs, and compares equal steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "t5_stages.py"
TINY = (
    "--hidden_size 64 --encoder_layers 2 --decoder_layers 1 --vocab_size 64 --encoder_length 16 "
    "--decoder_length 8 --num_micro_batches 2 --pairs 1 --warmup 1 --steps 2"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["t5", "bert"])
def test_both_layouts_are_timed_on_the_same_steps(model: str) -> None:
    command = [sys.executable, str(SCRIPT), "--model", model, *TINY.split()]
    job = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)

    assert job.returncode == 0, job.stderr[-3000:]
    *turns, summary = [json.loads(line) for line in job.stdout.splitlines()]
    assert [(turn["model"], turn["layout"]) for turn in turns] == [(model, "pp2"), (model, "tp2")]
    assert all(len(turn["step_seconds"]) == 2 for turn in turns)
    assert summary["largest_loss_difference"] < 1e-3
    assert len(summary["ratio_without_bubble"]) == 1
