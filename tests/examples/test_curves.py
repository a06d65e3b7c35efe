"""Loss curves as SVG."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def curves(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import curves

    return curves


def test_each_curve_is_a_path_inside_the_frame_with_its_name(curves):
    series = {"a < b": [(0, 8.4), (100, 5.1), (500, 4.6)], "two": [(0, 8.4), (500, 4.7)]}

    picture = curves.draw_curves(series, title="Loss", x_name="update", y_name="nats")

    root = ElementTree.fromstring(picture)
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"a < b", "two", "Loss", "update", "nats"} <= texts
    paths = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert [path.count("L") for path in paths] == [2, 1]
    points = [point.split() for path in paths for point in path[1:].split("L")]
    assert all(0 <= float(x) <= curves.WIDTH for x, _ in points)
    assert all(0 <= float(y) <= curves.HEIGHT for _, y in points)


@pytest.mark.parametrize("values", [[1e-4, 9e-4], [0, 0.7], [4.5, 8.4], [0, 1234], [3, 3]])
def test_ticks_are_few_round_and_span_the_values(curves, values):
    ticks = curves._ticks(values)

    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)
    assert 2 <= len(ticks) <= 8


def test_the_script_draws_metrics_files(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "eval_loss": 8.0}, {"step": 1, "loss": 7.0}, {"step": 2, "loss": 6.0}]
    metrics.write_text("\n".join(map(json.dumps, lines)))

    target = tmp_path / "loss.svg"
    subprocess.run(
        [sys.executable, EXAMPLES / "curves.py", target, f"one={metrics}", f"two={metrics}"],
        check=True,
    )

    assert {"one", "two"} <= {e.text for e in ElementTree.parse(target).iter(f"{SVG}text")}
