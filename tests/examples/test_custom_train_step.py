"""A loss of one's own: what it is, and that a pipeline learns by it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_tokens_predicted_well_count_for_less(gamma: float, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import custom_train_step

    step = object.__new__(custom_train_step.FocalTrainStep)
    step.gamma = gamma
    likely = torch.tensor([[0.9, 0.5], [0.1, 0.3]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])

    total, count, report = step.get_loss_func(None)(mask, -likely.log())

    kept = likely.flatten()[:3]
    expected = ((1 - kept) ** gamma * -kept.log()).sum()
    torch.testing.assert_close(total, expected)
    assert count == 3
    torch.testing.assert_close(report["lm loss"], torch.stack([expected, torch.tensor(3.0)]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_pipeline_learns_by_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate_megatron", "launch", "--cpu"]
    command += ["--num_processes=2", "--pp_degree=2", str(EXAMPLES / "custom_train_step.py")]
    command += ["--steps=40", "--seq_length=64", f"--cache={tmp_path}"]

    job = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)

    assert job.returncode == 0, job.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"focal loss ([0-9.]+)", job.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.5
