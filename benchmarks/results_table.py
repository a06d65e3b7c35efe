"""Writes the measured parts of README.md from benchmarks/results: nothing there is typed by hand.

python benchmarks/results_table.py [--check]

--check changes nothing and fails when README.md says something else than the results.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import marked_parts

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
    """Return a row for each case that was measured against the peer with equal settings."""
    by_case: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for text in (RESULTS / "train_step.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["peer"] == "hf-same-settings":
            by_case[line["case"]].append(line)
    return [_step_row(case, lines) for case, lines in by_case.items()]


def _step_row(case: str, lines: list[dict[str, Any]]) -> tuple[str, str, str]:
    ours, peer = (
        median(median(line[f"{side}_step_s"]) for line in lines) for side in ("ours", "peer")
    )
    ratios = ", ".join(f"{line['ratio']:.2f}" for line in lines)
    return (
        f"one update, `{case}`, against transformers + accelerate with equal settings",
        f"{ours:.2f} s against {peer:.2f} s; ratio of each pair {ratios}",
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
    # Before `make results` has run there is nothing to quote, and nothing is claimed.
    has_run = (RESULTS / "machine.json").is_file()
    parts = {f"results: {name}": make() if has_run else "" for name, make in PARTS.items()}
    return marked_parts.fill(text, parts)


def main() -> int:
    readme = ROOT / "README.md"
    return marked_parts.write_or_check(readme, fill(readme.read_text()))


if __name__ == "__main__":
    sys.exit(main())
