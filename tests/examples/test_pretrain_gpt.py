"""The main job: small in every layout, and whole as `make train` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
LAUNCH = [sys.executable, "-m", "accelerate_megatron", "launch", "--cpu"]
BF16 = ["--mixed_precision", "bf16"]
TINY = "--hidden_size 64 --layers 4 --vocab_size 512 --seq_length 64 --steps 8 --eval_rows 16"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(command, output, cache):
    """Run the script, and return what it printed and its summary."""
    job = subprocess.run(
        [*command, "--output", output, "--cache", cache],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    assert "deprecated" not in job.stderr  # nothing that the script's author cannot change
    return job.stdout, json.loads((output / "summary.json").read_text())


@pytest.mark.parametrize(
    ("start", "layout"),
    [
        pytest.param([sys.executable], (1, 1, 1), id="plain-python"),
        pytest.param(
            [*LAUNCH, "--tp_degree=2", "--pp_degree=2", *BF16], (2, 2, 1), id="tp2-pp2-bf16"
        ),
        pytest.param(
            [*LAUNCH, "--num_processes=4", "--tp_degree=2", "--sequence_parallelism=true"],
            (2, 1, 2),
            id="tp2-dp2-sp",
        ),
        pytest.param([*LAUNCH, "--context_parallel_size=2"], (1, 1, 1), id="cp2"),
        pytest.param(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            (1, 1, 2),
            id="plain-torchrun",
        ),
    ],
)
def test_the_example_trains_and_transformers_reads_it_back(tmp_path, cache, start, layout):
    _, summary = run([*start, str(SCRIPT), *TINY.split()], tmp_path, cache)

    assert (summary["tp"], summary["pp"], summary["dp"]) == layout
    assert summary["loss_after"] < summary["loss_before"] - 0.1
    assert abs(summary["loss_read_back"] - summary["loss_after"]) < 0.01
    assert summary["sample"].startswith("def ")
    assert len(summary["sample"]) > len("def ") + 20
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(9))
    assert {"loss", "grad_norm", "lr"} <= set(lines[1])
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files


def test_the_main_job_learns_and_stays_under_1500_mb(tmp_path, cache):
    # A sixth of its updates, as a CPU without instructions for bf16 takes over a second for each.
    layout = ["--tp_degree=2", "--pp_degree=2"]
    text, summary = run([*LAUNCH, *layout, *BF16, str(SCRIPT), "--steps=100"], tmp_path, cache)

    assert 8.2 < summary["loss_before"] < 8.6
    assert summary["loss_after"] < 6.3
    assert abs(summary["loss_read_back"] - summary["loss_after"]) < 0.01
    assert summary["peak_memory_gb"] < 1.5
    for words in ("validation loss: 8.", "tokens/s", "of what large matmuls reach", "GB at most"):
        assert words in text
