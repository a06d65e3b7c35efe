"""Draws the pictures of docs/which-layout.md: `python docs/draw.py`.

Ranks and passes are those that `accelerate-megatron plan` prints, from the same functions. With
--check it writes nothing and fails if a file is not what the code says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from accelerate_megatron.planning.bubble import bubble_share
from accelerate_megatron.planning.report import rank_grid, timeline

FOLDER = Path(__file__).parent
_STAGES, _MICRO_BATCHES = 4, 8
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
_CELL = 34
_TICK, _ROW = 17, 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    status = 0
    for name, text in pictures().items():
        file = FOLDER / name
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"{file} is not what the code says; run python docs/draw.py.", file=sys.stderr)
            status = 1
    return status


def pictures() -> dict[str, str]:
    """Return the text of each picture by the name of its file."""
    return {
        "rank-grid.svg": grid_picture(tp_size=2, cp_size=1, dp_size=2, pp_size=2),
        "pipeline.svg": pipeline_picture(_STAGES, _MICRO_BATCHES),
    }


def grid_picture(*, tp_size: int, cp_size: int, dp_size: int, pp_size: int) -> str:
    """Draw ranks as boxes: a row for each stage, a colour for each replica."""
    lines = rank_grid(tp_size, cp_size, dp_size, pp_size).splitlines()
    parts = []
    for at, line in enumerate(lines):
        stage, replica = divmod(at, dp_size)
        ranks = [int(word) for word in line.partition("[")[2].split() if word.isdigit()]
        x = 90 + replica * (len(ranks) * _CELL + 40)
        y = 40 + stage * (_CELL + 16)
        if stage == 0:
            parts.append(_text(x + len(ranks) * _CELL / 2, 28, f"replica {replica}"))
        if replica == 0:
            parts.append(_text(45, y + 22, f"stage {stage}"))
        parts += _boxes(ranks, x, y, _COLOURS[replica % len(_COLOURS)])
    width = 90 + dp_size * (tp_size * cp_size * _CELL + 40)
    note = f"boxes side by side: tensor-parallel ranks ({tp_size})"
    height = 40 + pp_size * (_CELL + 16) + 20
    parts.append(_text(width / 2, height - 8, note))
    return _svg(width, height, parts)


def _boxes(ranks: list[int], x: float, y: float, colour: str) -> Iterator[str]:
    for at, rank in enumerate(ranks):
        left = x + at * _CELL
        yield (
            f'<rect x="{left:g}" y="{y:g}" width="{_CELL}" height="{_CELL}" fill="{colour}" '
            'stroke="white" stroke-width="2"/>'
        )
        yield _text(left + _CELL / 2, y + 22, str(rank), "white")


def pipeline_picture(num_stages: int, num_micro_batches: int) -> str:
    """Draw a 1F1B step: forward passes blue, backward passes green, waiting left grey."""
    rows = [line.split()[-1] for line in timeline(num_stages, num_micro_batches).splitlines()]
    parts = []
    for stage, row in enumerate(rows):
        y = 16 + stage * _ROW
        parts.append(_text(38, y + 18, f"stage {stage}"))
        parts.append(
            f'<rect x="76" y="{y}" width="{len(row) * _TICK}" height="{_ROW - 4}" fill="#dddddd"/>'
        )
        parts += _passes(row, y)
    waits = rows[0].count(".") / len(rows[0])
    share = bubble_share(num_stages, num_micro_batches)
    assert abs(waits - share) < 1e-9, f"drawn {waits}, but the formula says {share}"
    width = 76 + len(rows[0]) * _TICK + 10
    note = (
        f"{num_stages} stages, {num_micro_batches} micro-batches: forward blue, backward green, "
        f"waiting grey ({share:.0%})"
    )
    height = 16 + num_stages * _ROW + 26
    parts.append(_text(width / 2, height - 8, note))
    return _svg(width, height, parts)


def _passes(row: str, y: int) -> Iterator[str]:
    tick = 0
    while tick < len(row):
        mark = row[tick]
        if mark == ".":
            tick += 1
            continue
        length = 1 if mark.isdigit() else 2
        number = mark if mark.isdigit() else str(ord(mark) - ord("a") + 1)
        colour = _COLOURS[0] if mark.isdigit() else _COLOURS[2]
        x = 76 + tick * _TICK
        yield (
            f'<rect x="{x}" y="{y}" width="{length * _TICK}" height="{_ROW - 4}" '
            f'fill="{colour}" stroke="white"/>'
        )
        yield _text(x + length * _TICK / 2, y + 18, number, "white")
        tick += length


def _text(x: float, y: float, words: str, colour: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="{colour}">{words}</text>'


def _svg(width: float, height: float, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif" font-size="12">'
    )
    background = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
