"""Loss curves as an SVG picture, drawn by hand so that no plotting package is needed.

python examples/curves.py loss.svg "1 rank=runs/one/metrics.jsonl" "DP4=runs/dp4/metrics.jsonl"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Curve = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 44
COLORS = ("#1f6f8b", "#c8553d", "#588157", "#7a5195")
# The first curve is the widest, so that equal curves show as stripes, not as the last one alone.
WIDEST, STEP = 5.0, 1.75


def draw_curves(curves: Mapping[str, Curve], *, title: str, x_name: str, y_name: str) -> str:
    """Return an SVG of the curves, each a sequence of (x, y), on common axes."""
    x_ticks = _ticks([x for curve in curves.values() for x, _ in curve])
    y_ticks = _ticks([y for curve in curves.values() for _, y in curve])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, size=14),
        _text(WIDTH / 2, HEIGHT - 8, x_name),
        f'<g transform="rotate(-90 14 {HEIGHT / 2})">{_text(14, HEIGHT / 2, y_name)}</g>',
    ]
    for tick in y_ticks:
        y = _place_y(tick, y_ticks)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>'
            + _text(LEFT - 6, y + 4, f"{tick:g}", anchor="end")
        )
    for tick in x_ticks:
        parts.append(_text(_place_x(tick, x_ticks), HEIGHT - BOTTOM + 18, f"{tick:g}"))
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        path = "L".join(f"{_place_x(x, x_ticks):.1f} {_place_y(y, y_ticks):.1f}" for x, y in curve)
        width = max(1.0, WIDEST - STEP * number) if len(curves) > 1 else 1.5
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        parts.append(_legend(name, color, number))
    return "\n".join([*parts, "</svg>\n"])


def read_metrics(path: Path, name: str) -> Curve:
    """Return (step, value) for each line of a metrics.jsonl that has `name`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def _legend(name: str, color: str, number: int) -> str:
    x, y = WIDTH - RIGHT - 190, TOP + 20 + 18 * number
    return f'<path d="M{x} {y - 4}h24" stroke="{color}" stroke-width="3"/>' + _text(
        x + 30, y, name, anchor="start"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


def _ticks(values: Sequence[float]) -> list[float]:
    """Return about five round numbers that span the values."""
    low, high = min(values), max(values)
    rough = max(high - low, 1e-9) / 5
    power = 10.0 ** (len(f"{rough:.0f}") - 1) if rough >= 1 else 10.0 ** -len(f"{1 / rough:.0f}")
    unit = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = low // unit
    count = int(-(-(high - first * unit) // unit))
    return [round((first + n) * unit, 10) for n in range(max(count, 1) + 1)]


def _place_x(x: float, ticks: Sequence[float]) -> float:
    return LEFT + (x - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - LEFT - RIGHT)


def _place_y(y: float, ticks: Sequence[float]) -> float:
    share = (y - ticks[0]) / (ticks[-1] - ticks[0])
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def main() -> None:
    target, *sources = sys.argv[1:]
    named = dict(source.split("=", 1) for source in sources)
    curves = {name: read_metrics(Path(path), "loss") for name, path in named.items()}
    picture = draw_curves(curves, title="Training loss", x_name="update", y_name="nats per token")
    Path(target).write_text(picture)


if __name__ == "__main__":
    main()
