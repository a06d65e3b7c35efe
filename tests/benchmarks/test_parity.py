"""`benchmarks/parity.py` on a few layouts, its verdict on wrong numbers, and the table of it."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "parity.py"
# One dense layout on four ranks, one with experts on two, and one axis that splits no weights.
CHOSEN = ["TP2 SP PP2 VP2 / gpt2 / adamw", "EP2 TP2 SP / mixtral / sgd", "CP2 / llama / sgd"]


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARK))


def test_chosen_layouts_agree_with_plain_pytorch(
    benchmark: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "parity.jsonl"
    words = ["--json", "--output", str(output), "--only", *CHOSEN]
    monkeypatch.setattr(sys, "argv", ["parity.py", *words])

    status = benchmark["main"]()

    printed, progress = capsys.readouterr()
    assert status == 0, printed
    assert output.read_text() == printed
    machine, *runs = [json.loads(line) for line in printed.splitlines()]
    assert set(machine["versions"]) >= {"torch", "megatron-core", "transformers"}
    names = [f"{run['layout']} / {run['model']} / {run['optimizer']}" for run in runs]
    assert sorted(names) == sorted(CHOSEN)
    for run in runs:
        assert run["agrees"]
        # Layouts add the same numbers in other orders: no difference at all would mean that one
        # side was compared with itself.
        assert 0 < run["weights"] <= 1e-4
        assert run["first_loss"] <= 1e-5
    assert "3/3" in progress


def test_at_least_sixty_layouts_of_up_to_eight_ranks(benchmark: dict[str, Any]) -> None:
    layouts = benchmark["LAYOUTS"]

    assert len({layout.name for layout in layouts}) == len(layouts) >= 60
    assert {layout.case.num_ranks for layout in layouts} >= {1, 2, 4, 8}
    assert {family for layout in layouts for family in layout.families} == set(benchmark["MODELS"])
    for layout in layouts:
        assert layout.case.micro_batch_rows >= 1, layout.name


def test_wrong_numbers_of_any_rank_are_seen(benchmark: dict[str, Any]) -> None:
    from tests.helpers.oracle_training import OracleRun
    from tests.parity.training import RankResult

    weights = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    oracle = OracleRun(losses=[2.0, 1.0], grad_norms=[4.0, 2.0], weights=weights)

    def rank(losses: list[float], norms: list[float], moved: float = 0.0) -> RankResult:
        moved_weights = {"a": weights["a"], "b": weights["b"] + moved}
        return RankResult(losses, norms, [], moved_weights, {})

    good = rank([2.0, 1.0], [4.0, 2.0])
    found = benchmark["differences"]

    assert set(found([good], oracle).values()) == {0.0}
    assert found([rank([2.0, 1.5], [4.0, 2.0]), good], oracle)["loss"] == 0.5
    assert found([rank([2.5, 1.0], [4.0, 2.0]), good], oracle)["first_loss"] == 0.5
    assert found([rank([2.0, 1.0], [4.0, 3.0]), good], oracle)["grad_norm"] == 0.5
    assert found([good, rank([2.0, 1.0], [4.0, 2.0], moved=1.0)], oracle)["weights"] == 0.5
    assert found([rank([2.0, math.nan], [4.0, 2.0]), good], oracle)["loss"] == math.inf
    del good.weights["b"]
    with pytest.raises(ValueError, match="returned no b"):
        found([good], oracle)


def test_the_page_shows_the_committed_results() -> None:
    job = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "parallelism_tables.py", "--check"],
        check=False,
        capture_output=True,
        text=True,
    )

    assert job.returncode == 0, job.stdout


def test_a_run_that_disagrees_stands_out_in_the_table() -> None:
    cell = runpy.run_path(str(ROOT / "benchmarks" / "parallelism_tables.py"))["cell"]
    good = {"agrees": True, "loss": 1e-7, "grad_norm": 2e-7, "weights": 3e-7}

    assert cell([good, {**good, "loss": 2e-7}]) == "2e-07 / 2e-07 / 3e-07"
    assert cell([good, {**good, "agrees": False, "weights": 0.5}]) == "**1e-07 / 2e-07 / 5e-01**"
    assert cell([good, {"agrees": False, "error": "refused"}]) == "fails"
    assert cell([]) == ""
