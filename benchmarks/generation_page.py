"""Writes the table of docs/generation.md from benchmarks/results/generate.jsonl.

    python benchmarks/generation_page.py [--check]

--check changes nothing and fails when the page says something else than the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import marked_parts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "generation.md"
RESULTS = ROOT / "benchmarks" / "results" / "generate.jsonl"
OURS, THEIRS = "accelerate-megatron", "transformers"


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table of the lines that sum up a model and a batch size, in their order."""
    if not lines:
        return "Not measured yet."
    first = lines[0]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    rows = [
        f"Measured on {first['date']}, {first['machine']}; {versions}. Tokens per second of all "
        "rows together; the last column compares our CPU time per token over the last 64 tokens "
        "with that over the first 64.",
        "",
        "| model | batch | threads | ours | transformers | ours / transformers | last / first |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        rates = line["tokens_per_second"]
        rows.append(
            f"| {line['family']}, {line['size']}, {line['length']} tokens | {line['batch']} | "
            f"{line['threads']} | {rates[OURS]:.0f} | {rates[THEIRS]:.0f} | {line['ratio']:.2f} | "
            f"{line['last_to_first_cpu_time']:.2f} |"
        )
    return "\n".join(rows)


def main() -> int:
    texts = RESULTS.read_text().splitlines() if RESULTS.is_file() else []
    lines = [line for line in map(json.loads, texts) if line.get("summary")]
    filled = marked_parts.fill(PAGE.read_text(), {"speed": table(lines)})
    return marked_parts.write_or_check(PAGE, filled)


if __name__ == "__main__":
    sys.exit(main())
