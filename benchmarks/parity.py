"""Every layout against plain transformers in one process that never imports this package.

    python benchmarks/parity.py [--json] [--output FILE] [--only PATTERNS ...] [--list]

For each layout and model, with SGD and with AdamW in fp32: five updates on ranks over gloo, and
the same in one process of plain PyTorch. Prints how far the two are apart at most in loss, in
gradient norm (relative) and in weights after the five updates (relative to the largest weight of
the tensor). Exits with 1 when a layout is farther from it than the limits. The file that --output
writes is what `parallelism_tables.py` makes the table of docs/parallelism.md from.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from parity_layouts import LAYOUTS, MODELS, MatrixLayout  # noqa: E402
from tests.helpers.oracle import oracle_run  # noqa: E402
from tests.helpers.oracle_training import LinearSchedule, OracleCase, OracleRun  # noqa: E402
from tests.helpers.ranks import run_ranks  # noqa: E402
from tests.helpers.tiny_models import (  # noqa: E402
    TinyModel,
    TinyOptimizer,
    global_batches,
    ragged_samples,
)
from tests.parity.training import GLOBAL_BATCH_ROWS, RankResult, Schedule, train  # noqa: E402

OPTIMIZERS = {
    "sgd": TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9}),
    "adamw": TinyOptimizer("adamw", {"lr": 1e-3, "weight_decay": 0.1}),
}
SCHEDULE = Schedule(warmup=2, total=10)
# Four full batches of 8 and a last one of 5, of different lengths, with -100 labels.
SAMPLES = ragged_samples(4 * GLOBAL_BATCH_ROWS + 5)
LIMITS = {"first_loss": 1e-5, "loss": 1e-4, "grad_norm": 1e-4, "weights": 1e-4}
"""The later losses have seen the rounding of all updates before them."""
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Run:
    """A layout, a model and an optimizer."""

    layout: MatrixLayout
    family: str
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.layout.name} / {self.family} / {self.optimizer}"


def all_runs(only: list[str]) -> list[Run]:
    """Return the runs whose names match any of the patterns; without patterns all of them."""
    runs = [
        Run(layout, family, optimizer)
        for layout in LAYOUTS
        for family in layout.families
        for optimizer in OPTIMIZERS
    ]
    return [
        run for run in runs if not only or any(fnmatchcase(run.name, pattern) for pattern in only)
    ]


def measure(run: Run) -> dict[str, Any]:
    """Train on the layout's ranks and in one plain process; return how far they are apart."""
    case, model, optimizer = run.layout.case, MODELS[run.family], OPTIMIZERS[run.optimizer]
    record: dict[str, Any] = {
        "benchmark": "parity",
        "layout": run.layout.name,
        "model": run.family,
        "optimizer": run.optimizer,
        "ranks": case.num_ranks,
        "plugin": {**case.plugin, "num_micro_batches": case.num_micro_batches},
    }
    started = time.perf_counter()
    try:
        ranks = run_ranks(
            train,
            case,
            model,
            optimizer,
            SAMPLES,
            SCHEDULE,
            num_ranks=case.num_ranks,
            timeout=TIMEOUT_SECONDS,
        )
        record |= differences(ranks, expected(model, optimizer))
        record["agrees"] = all(record[what] <= limit for what, limit in LIMITS.items())
    except Exception as error:  # the matrix goes on, and says so at its end
        record |= {"agrees": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    return {**record, "seconds": round(time.perf_counter() - started, 2)}


def expected(model: TinyModel, optimizer: TinyOptimizer) -> OracleRun:
    """Return what one process of plain PyTorch gives; it is asked once for each model."""
    return oracle_run(
        OracleCase(
            model=model,
            optimizer=optimizer,
            batches=global_batches(SAMPLES, GLOBAL_BATCH_ROWS),
            clip=1.0,
            schedule=LinearSchedule(warmup_steps=SCHEDULE.warmup, decay_steps=SCHEDULE.total),
        )
    )


def differences(ranks: list[RankResult], oracle: OracleRun) -> dict[str, float]:
    """Return the largest differences over all ranks, updates and tensors, by what differs."""
    weights = ranks[-1].weights
    if weights is None or not weights:
        raise ValueError("the last rank returned no weights")
    if missing := set(oracle.weights) - set(weights) - {"lm_head.weight"}:  # which may be tied
        raise ValueError(f"the last rank returned no {', '.join(sorted(missing))}")
    losses = [
        [abs(ours - plain) for ours, plain in zip(rank.losses, oracle.losses, strict=True)]
        for rank in ranks
    ]
    norms = [
        abs(ours / plain - 1)
        for rank in ranks
        for ours, plain in zip(rank.grad_norms, oracle.grad_norms, strict=True)
    ]
    return {
        "first_loss": largest(each[0] for each in losses),
        "loss": largest(number for each in losses for number in each),
        "grad_norm": largest(norms),
        "weights": largest(
            weight_difference(name, value, oracle.weights[name]) for name, value in weights.items()
        ),
    }


def largest(numbers: Iterable[float]) -> float:
    """Return the largest number; infinity where one is not a number, which `max` may pass over."""
    return max(math.inf if math.isnan(number) else number for number in numbers)


def weight_difference(name: str, ours: Any, plain: Any) -> float:
    """Return the largest difference of a tensor, relative to its largest weight.

    Key biases of GPT-2 are left out. Without rotary positions such a bias adds the same number to
    all scores of a query, so its gradient is zero up to rounding, and AdamW divides that noise by
    its own size.
    """
    difference = (ours - plain).abs()
    if name.endswith("c_attn.bias"):
        third = len(difference) // 3
        difference[third : 2 * third] = 0
    return float(difference.max() / plain.abs().max())


def machine() -> dict[str, Any]:
    """Return when and with what the matrix was run."""
    names = ("torch", "megatron-core", "accelerate", "transformers")
    return {
        "benchmark": "parity_machine",
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in names},
        },
    }


def records(runs: list[Run]) -> Iterator[dict[str, Any]]:
    """Yield what was run with, then a record for each run; say on stderr how far it is."""
    yield machine()
    for number, run in enumerate(runs, start=1):
        record = measure(run)
        verdict = "" if record["agrees"] else "  DISAGREES"
        print(
            f"{number}/{len(runs)}  {run.name}  {record['seconds']:.1f} s{verdict}",
            file=sys.stderr,
            flush=True,
        )
        yield record


def as_line(record: dict[str, Any]) -> str:
    name = f"{record['layout']} / {record['model']} / {record['optimizer']}"
    if "error" in record:
        return f"{name:72}  {record['error'].splitlines()[0]}"
    numbers = "  ".join(f"{what} {record[what]:.1e}" for what in ("loss", "grad_norm", "weights"))
    return f"{name:72}  {numbers}  {'agrees' if record['agrees'] else 'DISAGREES'}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", action="store_true", help="print a JSON line for each run")
    add("--output", type=Path, help="a file for the JSON lines, too")
    add(
        "--only", nargs="+", default=[], help="patterns of names, such as 'CP2*' or '* / llama / *'"
    )
    add("--list", action="store_true", help="print the names of the runs, and run nothing")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    runs = all_runs(args.only)
    if args.list:
        print("\n".join(run.name for run in runs))
        return 0
    if not runs:
        print(f"No run's name matches {' or '.join(map(repr, args.only))}.", file=sys.stderr)
        return 2
    failed = 0
    with open(args.output or os.devnull, "w", encoding="utf-8") as output:
        for record in records(runs):
            failed += record["benchmark"] == "parity" and not record["agrees"]
            line = json.dumps(record)
            print(line, file=output, flush=True)
            if args.json or record["benchmark"] == "parity":
                print(line if args.json else as_line(record), flush=True)
    if failed:
        print(f"{failed} of {len(runs)} runs disagree with plain PyTorch.", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
