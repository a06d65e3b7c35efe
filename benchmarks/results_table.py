"""Writes the measured parts of README.md from benchmarks/results: nothing there is typed by hand.

python benchmarks/results_table.py [--check]

--check changes nothing and fails when README.md says something else than the results.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def train_output() -> str:
    """Return what `make train` printed at its end."""
    return _console((RESULTS / "train-tp2-pp2.txt").read_text())


def tests_output() -> str:
    """Return the closing line of `make test`."""
    return _console((RESULTS / "tests.txt").read_text())


def table() -> str:
    """Return the table of what was checked, on which machine and with which versions."""
    machine = json.loads((RESULTS / "machine.json").read_text())
    rows = [*_training_rows(), *_step_rows()]
    return "\n".join(
        [
            f"{machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}, "
            f"megatron-core {machine['megatron-core']['version']}, accelerate "
            f"{machine['accelerate']}, transformers {machine['transformers']}:",
            "",
            "| what | result | with |",
            "| --- | --- | --- |",
            *(f"| {what} | {result} | {command} |" for what, result, command in rows),
        ]
    )


def _training_rows() -> list[tuple[str, str, str]]:
    rows = []
    for path in sorted(RESULTS.glob("train-*.json")):
        run = json.loads(path.read_text())
        layout = " x ".join(
            f"{axis.upper()}{run[axis]}" for axis in ("tp", "pp", "dp") if run[axis] > 1
        )
        rows.append(
            (
                f"GPT of the main job, {layout or 'one rank'}, {run['precision']}",
                f"validation loss {run['loss_before']:.2f} to {run['loss_after']:.2f} in "
                f"{run['seconds']:.0f} s of training, {run['tokens_per_second']:,.0f} tokens/s, "
                f"{run['peak_memory_gb']:.2f} GB per rank; plain transformers reads back "
                f"{run['loss_read_back']:.2f}",
                "`examples/pretrain_gpt.py`",
            )
        )
    return rows


def _step_rows() -> list[tuple[str, str, str]]:
    rows = []
    for line in (RESULTS / "train_step.jsonl").read_text().splitlines():
        summary = json.loads(line)
        if summary["benchmark"] == "train_step_summary":
            rows.append(_step_row(summary))
    return rows


def _step_row(summary: dict[str, Any]) -> tuple[str, str, str]:
    medians = summary["median_step_seconds"]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in summary["speedup_of_each_pair"])
    return (
        f"one update of GPT-2 {summary['size']}, {summary['dtype']}, {summary['ranks']} rank(s), "
        f"against transformers + accelerate",
        f"{medians['accelerate-megatron']:.2f} s against {medians['accelerate']:.2f} s; "
        f"ratio of each pair {ratios}",
        "`benchmarks/train_step.py`",
    )


def _console(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


PARTS: dict[str, Callable[[], str]] = {
    "train": train_output,
    "tests": tests_output,
    "table": table,
}


def fill(text: str) -> str:
    """Return `text` with each marked part replaced by what the results say."""
    for name, make in PARTS.items():
        marked = re.compile(rf"(<!-- results: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        # Before `make results` has run there is nothing to quote, and nothing is claimed.
        body = f"{make()}\n" if (RESULTS / "machine.json").is_file() else ""
        text = marked.sub(lambda found, body=body: f"{found[1]}{body}{found[2]}", text)
    return text


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    filled = fill(text)
    if "--check" in sys.argv[1:]:
        if filled != text:
            print("README.md differs from benchmarks/results; run benchmarks/results_table.py.")
        return int(filled != text)
    readme.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
