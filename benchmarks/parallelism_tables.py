"""Writes the measured tables of docs/parallelism.md from benchmarks/results.

    python benchmarks/parallelism_tables.py [--check]

--check changes nothing and fails when the page says something else than the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import marked_parts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parallelism.md"
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"gpt2": "GPT-2", "llama": "Llama", "mixtral": "Mixtral"}
MEASURES = ("loss", "grad_norm", "weights")


def matrix(records: list[dict[str, Any]]) -> str:
    """Return the matrix in Markdown: a row for each layout, a column for each model."""
    (machine,) = (record for record in records if record["benchmark"] == "parity_machine")
    runs = [record for record in records if record["benchmark"] == "parity"]
    layouts = list(dict.fromkeys((run["layout"], run["ranks"]) for run in runs))
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    agreeing = sum(run["agrees"] for run in runs)
    return "\n".join(
        [
            f"Written by `benchmarks/parity.py` on {machine['date']}: {len(layouts)} layouts, "
            f"{agreeing} of {len(runs)} runs agree. {versions}; fp32 over gloo. A cell is the "
            "larger of SGD and AdamW: the largest difference of the loss, of the gradient norm "
            "(relative) and of the weights after five updates (relative to a tensor's largest).",
            "",
            f"| layout | ranks | {' | '.join(MODELS.values())} |",
            f"| --- | --- |{' --- |' * len(MODELS)}",
            *(
                f"| {layout} | {ranks} | "
                + " | ".join(
                    cell([r for r in runs if (r["layout"], r["model"]) == (layout, m)])
                    for m in MODELS
                )
                + " |"
                for layout, ranks in layouts
            ),
        ]
    )


def cell(runs: list[dict[str, Any]]) -> str:
    """Return the differences of a layout and model; empty where it is not run."""
    if not runs:
        return ""
    if any("error" in run for run in runs):
        return "fails"
    numbers = " / ".join(f"{max(run[what] for run in runs):.0e}" for what in MEASURES)
    return numbers if all(run["agrees"] for run in runs) else f"**{numbers}**"


def memory_table(records: list[dict[str, Any]]) -> str:
    """Return what training holds, each kind of number at its farthest from what it should be."""
    cases = [record for record in records if record["benchmark"] == "memory"]
    versions = ", ".join(f"{name} {number}" for name, number in records[0]["versions"].items())
    lines = [
        f"Written by `benchmarks/memory.py` ({versions}): bytes on each rank, without dropout, as "
        "a ratio of measured to expected; of several ranks and kinds the one farthest from 1. "
        "s b h is tokens x rows x hidden size of a rank's replica.",
        "",
        "| case | against its formula | measured / formula | measured / `plan` |",
        "| --- | --- | --- | --- |",
    ]
    for case in cases:
        plans = [check for check in case["checks"] if check["what"].startswith("plan: ")]
        others = [check for check in case["checks"] if not check["what"].startswith("plan: ")]
        kind = others[0]["what"].rsplit(",", 1)[0] if others else ""
        formula = f"{kind}: {others[0]['expected']:.4g}" if others else ""
        lines.append(f"| {case['case']} | {formula} | {farthest(others)} | {farthest(plans)} |")
    return "\n".join(lines)


def farthest(checks: list[dict[str, Any]]) -> str:
    """Return the ratio that is farthest from 1, bold when it is outside of its limit."""
    if not checks:
        return ""
    worst = max(checks, key=lambda check: abs(check["ratio"] - 1))
    return f"{worst['ratio']:.3f}" if worst["agrees"] else f"**{worst['ratio']:.3f}**"


def bubble_table(records: list[dict[str, Any]]) -> str:
    """Return the share of a step that stages wait, measured and by the formula."""
    return "\n".join(
        [
            "Written by `benchmarks/bubble.py`: the share of a step that a stage waits, where all "
            "stages take equally long (they sleep); bold where it is not within 10%. Whatever else "
            "runs on the machine adds to it.",
            "",
            "| stages | chunks on each | micro-batches | forward pass | measured | "
            "(p - 1) / (v m + p - 1) |",
            "| --- | --- | --- | --- | --- | --- |",
            *(
                f"| {r['stages']} | {r['chunks']} | {r['micro_batches']} | "
                f"{r['forward_seconds']:g} s | "
                f"{'' if r['agrees'] else '**'}{r['measured']:.3f}{'' if r['agrees'] else '**'} | "
                f"{r['expected']:.3f} |"
                for r in records
            ),
        ]
    )


PARTS = {
    "parity-matrix": ("parity.jsonl", matrix),
    "memory": ("memory.jsonl", memory_table),
    "bubble": ("bubble.jsonl", bubble_table),
}


def fill(text: str, results: Path = RESULTS) -> str:
    """Return `text` with its marked parts replaced by what the results say."""
    parts = {}
    for name, (file, make) in PARTS.items():
        parts[name] = make([json.loads(line) for line in (results / file).read_text().splitlines()])
    return marked_parts.fill(text, parts)


def main() -> int:
    return marked_parts.write_or_check(PAGE, fill(PAGE.read_text()))


if __name__ == "__main__":
    sys.exit(main())
