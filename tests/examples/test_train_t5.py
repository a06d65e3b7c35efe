"""The T5 example, small, over two stages and over two tensor-parallel ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_t5.py"
LAUNCH = [sys.executable, "-m", "accelerate_megatron", "launch", "--cpu", "--num_processes=2"]
SPLIT = ["--pp_degree=2", "--pipeline_model_parallel_split_rank=1"]
# Little, and yet enough to know more than how often each token occurs.
SMALL = "--hidden_size 64 --vocab_size 300 --steps 200 --eval_rows 64 --lr 1e-2"
TINY = "--hidden_size 32 --vocab_size 300 --window 32 --spans 2 --steps 6 --eval_rows 16"


def run(command, output, cache):
    """Run the script, and return its summary."""
    job = subprocess.run(
        [*command, "--output", output, "--cache", cache],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    return json.loads((output / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_trains_on_two_stages_and_transformers_reads_it_back(tmp_path):
    summary = run([*LAUNCH, *SPLIT, SCRIPT, *TINY.split()], tmp_path, tmp_path / "cache")

    assert summary["loss_after"] < summary["loss_before"]
    assert abs(summary["loss_read_back"] - summary["loss_after"]) < 0.01


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_beats_guessing_by_how_often_tokens_occur(tmp_path):
    layout = ["--threads=1", "--tp_degree=2"]

    summary = run([*LAUNCH, *layout, SCRIPT, *SMALL.split()], tmp_path, tmp_path / "cache")

    assert 3 < summary["loss_unigram"] < 4
    assert summary["loss_after"] < summary["loss_unigram"] - 0.1
    assert abs(summary["loss_read_back"] - summary["loss_after"]) < 0.01


def test_cut_spans_leave_nothing_out_and_mark_their_places(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from train_t5 import SPAN_LENGTH, CutSpans

    tokens = torch.arange(24)
    inputs, labels = CutSpans(100, num_spans=2, seed=0).cut(tokens)

    assert labels[:: SPAN_LENGTH + 1].tolist() == [100, 101, 102]
    first, second = labels[1 : 1 + SPAN_LENGTH], labels[2 + SPAN_LENGTH : -1]
    whole = []
    for token in inputs:
        whole += {100: first.tolist(), 101: second.tolist()}.get(int(token), [int(token)])
    assert whole == tokens.tolist()
