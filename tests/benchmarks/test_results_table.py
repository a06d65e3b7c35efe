"""The measured parts of README.md come from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = {
    "tp": 2,
    "pp": 2,
    "dp": 1,
    "precision": "bf16",
    "loss_before": 8.366,
    "loss_after": 4.612,
    "loss_read_back": 4.6124,
    "seconds": 201.4,
    "tokens_per_second": 6543.2,
    "peak_memory_gb": 0.61,
}
STEPS = [
    {
        "case": "gpt2-S-fp32",
        "peer": peer,
        "ours_step_s": [2.0, 2.0, 9.0],
        "peer_step_s": [3.0, 3.04, 1.0],
        "ratio": ratio,
    }
    for peer, ratio in (("hf-same-settings", 1.5), ("hf-as-run", 2.5), ("hf-same-settings", 1.52))
]
MACHINE = {
    "cores": 2,
    "python": "3.11.7",
    "torch": "2.13.0",
    "accelerate": "1.15.0",
    "transformers": "5.24.0",
    "megatron-core": {"version": "0.16.1"},
}


@pytest.fixture
def results_table(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import results_table

    (tmp_path / "train-tp2-pp2.txt").write_text("validation loss: 8.366 before\n")
    (tmp_path / "tests.txt").write_text("== 300 passed in 400.00s ==\n")
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    (tmp_path / "train-tp2-pp2.json").write_text(json.dumps(RUN))
    (tmp_path / "train-one.json").write_text(json.dumps({**RUN, "tp": 1, "pp": 1}))
    (tmp_path / "train_step.jsonl").write_text("\n".join(map(json.dumps, STEPS)))
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    return results_table


def test_marked_parts_are_replaced_and_the_rest_is_kept(results_table):
    text = (
        "a\n<!-- results: tests -->\nold\n<!-- /results: tests -->\nb\n"
        "<!-- results: train -->\n<!-- /results: train -->\n"
    )

    filled = results_table.fill(text)

    assert filled == (
        "a\n<!-- results: tests -->\n```text\n== 300 passed in 400.00s ==\n```\n"
        "<!-- /results: tests -->\nb\n"
        "<!-- results: train -->\n```text\nvalidation loss: 8.366 before\n```\n"
        "<!-- /results: train -->\n"
    )
    assert results_table.fill(filled) == filled


def test_the_table_has_a_row_for_each_run_and_each_comparison(results_table):
    lines = results_table.table().splitlines()

    assert "2 cores, Python 3.11.7, torch 2.13.0, megatron-core 0.16.1" in lines[0]
    assert "one rank, bf16 | validation loss 8.37 to 4.61 in 201 s" in lines[4]
    assert "TP2 x PP2, bf16" in lines[5]
    assert "2.00 s against 3.00 s; ratio of each pair 1.50, 1.52" in lines[6]


def test_the_readme_says_what_the_results_say(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import results_table

    text = (results_table.ROOT / "README.md").read_text()

    assert results_table.fill(text) == text
