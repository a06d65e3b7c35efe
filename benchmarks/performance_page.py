"""Writes the measured parts of docs/performance.md, and its picture, from benchmarks/results.

    python benchmarks/performance_page.py [--check]

--check changes nothing and fails when the page says something else than the results.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import marked_parts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "performance.svg"
RESULTS = ROOT / "benchmarks" / "results" / "train_step.jsonl"
SAME, AS_RUN, COMPILED, ONE = "hf-same-settings", "hf-as-run", "hf-compile", "one-process"
COLOURS = {SAME: "#4c78a8", AS_RUN: "#f58518", COMPILED: "#54a24b"}
Lines = list[dict[str, Any]]
Cases = dict[str, dict[str, Lines]]


def read(file: Path) -> Cases:
    """Return the lines of each case by their peer."""
    cases: Cases = defaultdict(lambda: defaultdict(list))
    for text in file.read_text().splitlines():
        line = json.loads(text)
        cases[line["case"]][line["peer"]].append(line)
    return cases


def steps(cases: Cases) -> str:
    """Return the table of cases that a peer runs too."""
    rows = [
        "| case | ours, s | equal settings | as people run it | torch.compile | "
        "share of the matmul limit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, peers in cases.items():
        if not set(peers) & {SAME, AS_RUN}:
            continue
        lines = next(iter(peers.values()))
        share = median(line["ours_gflops"] / line["limit_gflops"] for line in lines)
        ratios = " | ".join(_ratio(peers.get(peer)) for peer in (SAME, AS_RUN, COMPILED))
        rows.append(f"| `{case}` | {_seconds(lines):.2f} | {ratios} | {share:.2f} |")
    return "\n".join([*_machine(cases), *rows])


def parallel(cases: Cases) -> str:
    """Return the table of layouts against one process with all cores."""
    rows = ["| case | ours, s | one process / ours |", "| --- | --- | --- |"]
    for case, peers in cases.items():
        if ONE in peers:
            rows.append(f"| `{case}` | {_seconds(peers[ONE]):.2f} | {_ratio(peers[ONE])} |")
    return "\n".join(rows)


def start_and_memory(cases: Cases) -> str:
    """Return the table of the time to the end of the first step, and of memory."""
    rows = [
        "| case | first step, s (ours / as people run it) | peak GB of a rank (the same) |",
        "| --- | --- | --- |",
    ]
    for case, peers in cases.items():
        lines = peers.get(AS_RUN)
        if lines:
            cells = " | ".join(
                f"{_of('ours', key, lines):.2f} / {_of('peer', key, lines):.2f} = "
                f"{_of('ours', key, lines) / _of('peer', key, lines):.2f}"
                for key in ("first_step_s", "peak_rss_gb")
            )
            rows.append(f"| `{case}` | {cells} |")
    return "\n".join(rows)


def picture(cases: Cases) -> str:
    """Return bars of the ratios as SVG; the line at 1 is our own speed."""
    bars = [
        (case, peer, median(line["ratio"] for line in peers[peer]))
        for case, peers in cases.items()
        for peer in COLOURS
        if peer in peers
    ]
    row, left, unit = 18, 150, 150
    height = row * len(bars) + 50
    parts = []
    for at, (case, peer, ratio) in enumerate(bars):
        y = 30 + at * row
        if at == 0 or bars[at - 1][0] != case:
            parts.append(_text(left - 6, y + 12, case, "end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{ratio * unit:.1f}" height="{row - 4}" '
            f'fill="{COLOURS[peer]}"/>'
        )
        parts.append(_text(left + ratio * unit + 4, y + 12, f"{ratio:.2f}", "start"))
    parts.append(
        f'<line x1="{left + unit}" y1="24" x2="{left + unit}" y2="{height - 20}" stroke="black" '
        'stroke-dasharray="3"/>'
    )
    for at, (peer, colour) in enumerate(COLOURS.items()):
        parts.append(_text(left + at * 140, 16, peer, "start", colour))
    width = left + unit * max([1.0, *(ratio for *_, ratio in bars)]) + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" font-family="sans-serif" font-size="11">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str, colour: str = "black") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} text-anchor="{anchor}" fill="{colour}">{words}</text>'


def _machine(cases: Cases) -> list[str]:
    lines = [line for peers in cases.values() for found in peers.values() for line in found]
    dates = sorted({line["date"] for line in lines})
    limits = sorted({round(line["limit_gflops"]) for line in lines})
    versions = ", ".join(f"{name} {number}" for name, number in lines[0]["versions"].items())
    return [
        f"Measured on {' and '.join(dates)}, {lines[0]['machine']}; {versions}. Products of "
        f"2048 x 2048 matrices reached {limits[0]} to {limits[-1]} GFLOP/s beside the steps.",
        "",
    ]


def _seconds(lines: Lines) -> float:
    return median(median(line["ours_step_s"]) for line in lines)


def _of(side: str, key: str, lines: Lines) -> float:
    return median(line[f"{side}_{key}"] for line in lines)


def _ratio(lines: Lines | None) -> str:
    """Return the middle of the ratios of all pairs, and how far they reach."""
    if not lines:
        return ""
    ratios = sorted(line["ratio"] for line in lines)
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def main() -> int:
    cases = read(RESULTS)
    tables = {"steps": steps, "parallel": parallel, "start-and-memory": start_and_memory}
    parts = {name: table(cases) if cases else "Not measured yet." for name, table in tables.items()}
    page = marked_parts.write_or_check(PAGE, marked_parts.fill(PAGE.read_text(), parts))
    return max(page, marked_parts.write_or_check(PICTURE, picture(cases)))


if __name__ == "__main__":
    sys.exit(main())
