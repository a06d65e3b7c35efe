"""The table of docs/generation.md comes from benchmarks/results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LINE = {
    "summary": True,
    "family": "gpt2",
    "size": "small",
    "length": 512,
    "batch": 8,
    "threads": 2,
    "tokens_per_second": {"accelerate-megatron": 310.4, "transformers": 200.2},
    "ratio": 1.551,
    "last_to_first_cpu_time": 1.119,
    "date": "2026-12-01",
    "machine": "a processor, 2 cores",
    "versions": {"torch": "2.13.0"},
}


def test_the_page_says_what_the_results_say(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["generation_page.py"])
    import generation_page

    page, results = tmp_path / "generation.md", tmp_path / "generate.jsonl"
    page.write_text("a\n<!-- speed -->\nold\n<!-- /speed -->\nb\n")
    monkeypatch.setattr(generation_page, "PAGE", page)
    monkeypatch.setattr(generation_page, "RESULTS", results)
    generation_page.main()
    assert "Not measured yet." in page.read_text()

    results.write_text(f"{json.dumps({'side': 'transformers'})}\n{json.dumps(LINE)}\n")
    monkeypatch.setattr(sys, "argv", ["generation_page.py", "--check"])
    assert generation_page.main() == 1
    monkeypatch.setattr(sys, "argv", ["generation_page.py"])
    generation_page.main()

    row = "| gpt2, small, 512 tokens | 8 | 2 | 310 | 200 | 1.55 | 1.12 |"
    assert row in page.read_text().splitlines()


def test_the_page_in_the_repository_is_up_to_date(monkeypatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["generation_page.py", "--check"])
    import generation_page

    assert generation_page.main() == 0
