"""`benchmarks/generate.py` at its smallest: both sides, in turn, give the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "generate.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_both_sides_take_turns_and_give_the_same_tokens(family: str) -> None:
    job = subprocess.run(
        [
            sys.executable,
            BENCHMARK,
            "--size=tiny",
            "--length=24",
            "--pairs=2",
            f"--family={family}",
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    lines = [json.loads(line) for line in job.stdout.splitlines()]

    summaries = [line for line in lines if line.get("summary")]
    assert [line["batch"] for line in summaries] == [1, 8]
    assert all(line["same_tokens"] for line in summaries)
    ours, other = "accelerate-megatron", "transformers"
    sides = [line["side"] for line in lines if not line.get("summary")]
    assert sides == [ours, other, other, ours] * 2
