"""One training step through us and through transformers + accelerate, side by side.

    python benchmarks/train_step.py --cases gpt2-S-bf16 gpt2-S-bf16-tp2 --pairs 3
    python benchmarks/train_step.py --list

All sides of a case train the same model from the same weights on the same batches with AdamW and
as many threads. They take turns, each time in fresh processes, since Accelerate's state is one per
process. The other sides are:

hf-as-run         transformers + accelerate, started as people do: python or torchrun, autocast
hf-same-settings  with what our launcher sets (allocator, threads), parameters of our dtype, and the
                  fastest of the options in `TUNED`, found in the same run
hf-compile        hf-same-settings, the model compiled by torch.compile
one-process       ours, one process with all threads: what parallelism is measured against

Prints a JSON line for each pair of sides and turn, with the raw seconds of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

SIDE = Path(__file__).with_name("train_step_side.py")
OURS = "ours"
HF = ("hf-as-run", "hf-same-settings", "hf-compile")
ONE_PROCESS = "one-process"
TUNED = {
    "bf16": {"attention": ("sdpa", "eager"), "fused_adamw": (False, True)},
    "fp32": {
        "attention": ("sdpa", "eager"),
        "fused_adamw": (False, True),
        # On some CPUs another library, in fp32 too; on others bf16, which would be the peer's gain.
        "matmul_precision": ("highest", "medium"),
    },
}
"""What the peer with our settings is tuned over, by the dtype of the case."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is laid out."""

    family: str
    size: str
    dtype: str
    ranks: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    micro_batches: int = 1
    peers: tuple[str, ...] = HF

    @property
    def name(self) -> str:
        """The case in a word."""
        words = [self.family, self.size, self.dtype]
        replicas = self.ranks // (self.tp * self.pp)
        words += [
            f"{axis}{degree}"
            for axis, degree in (("dp", replicas), ("tp", self.tp), ("pp", self.pp))
            if degree > 1
        ]
        if self.sp:
            words.append("sp")
        if self.micro_batches > 1:
            words.append(f"m{self.micro_batches}")
        return "-".join(words)


def _cases() -> Iterator[Case]:
    for family, size, dtype in product(("gpt2", "llama"), ("S", "B"), ("bf16", "fp32")):
        yield Case(family, size, dtype)
    small = Case("gpt2", "S", "bf16", ranks=2, peers=(ONE_PROCESS,))
    yield replace(small, peers=("hf-as-run", "hf-same-settings", ONE_PROCESS))
    yield replace(small, tp=2)
    yield replace(small, tp=2, sp=True)
    yield replace(small, pp=2, micro_batches=4)
    yield replace(small, pp=2, micro_batches=8)
    # For a test of this file.
    yield Case("gpt2", "tiny", "fp32", peers=("hf-as-run", "hf-same-settings"))
    yield Case("llama", "tiny", "fp32", ranks=2, tp=2, peers=(ONE_PROCESS,))


CASES = {case.name: case for case in _cases()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shown = [name for name, case in CASES.items() if case.size != "tiny"]
    add("--cases", nargs="+", choices=CASES, default=shown, metavar="CASE")
    add("--list", action="store_true", help="print the cases and stop")
    add("--pairs", type=int, default=3, help="turns of each side (3)")
    add("--warmup", type=int, default=2, help="steps of a turn that do not count (2)")
    add("--steps", type=int, default=5, help="steps of a turn that count (5)")
    return parser.parse_args()


@dataclass(frozen=True)
class Bench:
    """Runs the sides of one case."""

    case: Case
    warmup: int
    steps: int
    cores: int

    def lines(self, pairs: int) -> Iterator[dict[str, Any]]:
        """Let the sides take turns, each being the first as often; yield a line for each pair."""
        options = self._tuned() if set(HF[1:]) & set(self.case.peers) else {}
        sides = (OURS, *self.case.peers)
        for pair in range(pairs):
            limit = self._run("limit", {})["gflops"]
            turn = pair % len(sides)
            reports = {side: self._run(side, options) for side in sides[turn:] + sides[:turn]}
            for peer in self.case.peers:
                yield {
                    "benchmark": "train_step",
                    "case": self.case.name,
                    "peer": peer,
                    "pair": pair,
                    "limit_gflops": limit,
                    "peer_options": options if peer in HF[1:] else {},
                    **_compared(reports[OURS], reports[peer]),
                }

    def _tuned(self) -> dict[str, Any]:
        """Return the options with which the peer's step is fastest, found one after another."""
        quick = replace(self, warmup=1, steps=3)
        tuned = TUNED[self.case.dtype]
        options = {name: choices[0] for name, choices in tuned.items()}
        fastest = min(quick._run("hf-same-settings", options)["step_s"])
        for name, choices in tuned.items():
            for choice in choices[1:]:
                other = {**options, name: choice}
                seconds = min(quick._run("hf-same-settings", other)["step_s"])
                if seconds < fastest:
                    options, fastest = other, seconds
        return options

    def _run(self, side: str, options: dict[str, Any]) -> dict[str, Any]:
        case = self.case
        if side in (ONE_PROCESS, "limit"):
            case = replace(case, ranks=1, tp=1, sp=False, pp=1, micro_batches=1)
        job = {
            **asdict(case),
            "side": side,
            "warmup": self.warmup,
            "steps": self.steps,
            "options": options,
            "started": time.time(),
        }
        result = subprocess.run(
            [*self._starter(side, case), SIDE, json.dumps(job)],
            env=self._environment(side, case),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        report: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
        return report

    def _starter(self, side: str, case: Case) -> list[str]:
        if side != "hf-as-run":
            words = ["-m", "accelerate_megatron", "launch", "--cpu"]
            return [sys.executable, *words, "--num_processes", str(case.ranks)]
        if case.ranks == 1:
            return [sys.executable]
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        return [sys.executable, *words, str(case.ranks)]

    def _environment(self, side: str, case: Case) -> dict[str, str]:
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        if side == "hf-as-run":  # the launcher would do it
            threads = str(self.cores // case.ranks)
            environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        return environment


def _compared(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Return what a line says of two reports; a ratio above 1: ours takes less."""
    both = {"ours": ours, "peer": peer}
    medians = {side: statistics.median(report["step_s"]) for side, report in both.items()}
    losses = zip(ours["losses"], peer["losses"], strict=True)
    return {
        **{f"{side}_step_s": report["step_s"] for side, report in both.items()},
        "ratio": medians["peer"] / medians["ours"],
        **{
            f"{side}_{key}": report[key]
            for key in ("first_step_s", "import_s", "peak_rss_gb", "parameters", "threads")
            for side, report in both.items()
        },
        "ours_gflops": ours["flops"] / medians["ours"] / 1e9,
        "largest_loss_difference": max(abs(a - b) for a, b in losses),
        "versions": ours["versions"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": _machine(),
    }


def _machine() -> str:
    """Return the processor's name and the cores this process may use."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'an unnamed CPU'}"


def main() -> None:
    args = parse_args()
    if args.list:
        print("\n".join(CASES))
        return
    cores = len(os.sched_getaffinity(0))
    for name in args.cases:
        bench = Bench(CASES[name], args.warmup, args.steps, cores)
        for line in bench.lines(args.pairs):
            print(json.dumps(line), flush=True)
            seconds = statistics.median(line["ours_step_s"])
            print(
                f"{name}: {seconds:.3f} s a step, {line['peer']} / ours {line['ratio']:.2f}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
