"""`accelerate-megatron doctor`: is this machine in order, and if not, what mends it?"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate_megatron.cli.env import PACKAGES, find_facts
from accelerate_megatron.cli.jobs import run_job
from accelerate_megatron.cli.machine import Machine

TOLERANCE = 1e-4
"""Largest difference of loss and gradient norm of two updates, as a part of them."""

FREE_BYTES = 200 * 10**6
"""What the test itself and its temporary files need."""

_EXAMPLE = """
Runs in under a minute on two ranks: on GPUs when there are two, else on the CPU.

example: whether the folder of the checkpoints is in order, too
  accelerate-megatron doctor --folder /shared/checkpoints
"""

_CURES = {
    "ranks": "the error above says what stopped them; docs/errors.md has its cure.",
    "collectives": "on several network devices name one: GLOO_SOCKET_IFNAME=lo for CPU ranks, "
    "NCCL_SOCKET_IFNAME for GPUs; NCCL_DEBUG=INFO shows where NCCL stops.",
    "checkpoint": "name a folder that can be written, with --folder; on a network file system "
    "try a local one to tell the two apart.",
    "training step": "train with tp_degree 1, and report it with the output of "
    "`accelerate-megatron env --json`.",
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str
    cure: str = ""
    """What mends it; empty when nothing is wrong."""


def main(argv: Sequence[str]) -> int:
    """Check the machine; return 0 when all is in order, 1 when something is not, 2 on misuse.

    Args:
        argv: The words after `doctor`.
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    if not Path(args.folder).is_dir():
        parser.error(f"--folder {args.folder}: no such folder; name one that is there.")
    started = time.monotonic()
    checks = check_machine(find_facts(), Path(args.folder), os.environ)
    if all(check.ok for check in checks):
        checks += _check_ranks(Path(args.folder), use_cpu=args.cpu)
    seconds = time.monotonic() - started
    is_ok = all(check.ok for check in checks)
    if args.json:
        shown = {"ok": is_ok, "seconds": seconds, "checks": [asdict(check) for check in checks]}
        print(json.dumps(shown, indent=2))
    else:
        print(describe(checks, seconds))
    return 0 if is_ok else 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron doctor",
        description="Check versions, threads and disk; then, on two ranks, collectives, an update "
        "at TP1 and TP2, and a checkpoint.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, whatever GPUs there are")
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="where to save and load the checkpoint (the system's temporary folder)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def check_machine(
    facts: Mapping[str, Any], folder: Path, environ: Mapping[str, str]
) -> list[Check]:
    """Return what can be said without starting a rank: versions, threads, disk.

    Args:
        facts: Those of `accelerate-megatron env`.
        folder: Where the checkpoint will be written.
        environ: The environment.
    """
    return [
        _check_versions(facts),
        _describe_devices(facts["cuda"]),
        _check_threads(facts["cores"], environ.get("OMP_THREAD_LIMIT")),
        _check_disk(folder, shutil.disk_usage(folder).free),
    ]


def _check_versions(facts: Mapping[str, Any]) -> Check:
    missing = [name for name in PACKAGES if facts[name] is None]
    core = facts["megatron-core"]
    found = ", ".join(
        [f"megatron-core {core['version']}", *(f"{name} {facts[name]}" for name in PACKAGES[:3])]
    )
    if not core["usable"]:
        return Check("versions", False, found, core["problem"])
    if missing:
        cure = f"install what is missing: pip install {' '.join(missing)}"
        return Check("versions", False, f"{found}; not installed: {', '.join(missing)}", cure)
    return Check("versions", True, found)


def _describe_devices(cuda: Mapping[str, Any]) -> Check:
    """Say what torch can train on; a CPU is in order, but need not be what its owner expects."""
    built_for, count = cuda["torch built for"], cuda["devices"]
    if count:
        found = f"{count} CUDA device(s)"
    elif built_for is None:
        found = "the CPU only: this torch is built without CUDA"
    else:
        found = f"the CPU only: torch, built for CUDA {built_for}, sees no GPU"
    return Check("devices", True, found)


def _check_threads(cores: int, limit: str | None) -> Check:
    threads = threads_per_rank(cores)
    found = f"{cores} core(s), so {threads} thread(s) for each of two ranks"
    if limit is not None and limit.isdecimal() and int(limit) < threads:
        return Check(
            "threads",
            False,
            f"{found}, but OMP_THREAD_LIMIT={limit}: torch computes wrong numbers with it",
            "unset OMP_THREAD_LIMIT.",
        )
    if cores < 2:
        found += "; they take turns, so it works, slowly"
    return Check("threads", True, found)


def threads_per_rank(cores: int) -> int:
    """Return the threads that the launcher gives each of two ranks."""
    return max(1, cores // 2)


def _check_disk(folder: Path, free: int) -> Check:
    found = f"{free / 1e9:.1f} GB free in {folder}"
    if free < FREE_BYTES:
        cure = f"make {FREE_BYTES / 1e9:.1f} GB free, or name another folder with --folder."
        return Check("disk", False, found, cure)
    return Check("disk", True, found)


def _check_ranks(folder: Path, *, use_cpu: bool) -> list[Check]:
    """Run one rank at TP1, then two at TP2; return what they found."""
    machine = Machine.find()
    flags = ["--threads", str(threads_per_rank(machine.cores)), "--mixed_precision", "no"]
    if use_cpu or machine.cuda_devices < 2:
        flags.append("--cpu")
    try:
        place = tempfile.TemporaryDirectory(prefix="accelerate-megatron-doctor-", dir=folder)
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror})"
        return [Check("checkpoint", False, found, _CURES["checkpoint"])]
    with place as work:
        for tp_degree in (1, 2):
            _run_ranks(work, tp_degree, flags)
        return judge([_read(work, 1, 0)], [_read(work, 2, rank) for rank in (0, 1)])


def _run_ranks(work: str, tp_degree: int, flags: Sequence[str]) -> None:
    environ = dict(os.environ)
    # Warnings of other libraries would hide what this command has to say.
    os.environ["PYTHONWARNINGS"] = "ignore"
    sizes = ["--num_processes", str(tp_degree), "--tp_degree", str(tp_degree)]
    settings = {"folder": work, "tp_degree": tp_degree}
    try:
        run_job("accelerate_megatron.cli.doctor_ranks", settings, [*flags, *sizes])
    finally:  # the launcher leaves its variables behind, and the next job would wonder about them
        os.environ.clear()
        os.environ.update(environ)


def _read(work: str, tp_degree: int, rank: int) -> dict[str, Any]:
    """Return what a rank wrote down; empty when it did not get that far."""
    file = report_file(work, tp_degree, rank)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def report_file(work: str, tp_degree: int, rank: int) -> Path:
    """Return the file in which a rank writes down what it found, check by check."""
    return Path(work) / f"tp{tp_degree}-rank{rank}.json"


def judge(alone: Sequence[Mapping[str, Any]], pair: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return the checks of what ranks wrote down.

    Args:
        alone: Of the single rank of the job at TP1.
        pair: Of the two ranks of the job at TP2.
    """
    silent = [rank for rank, report in enumerate(pair) if "device" not in report]
    if silent or "device" not in alone[0]:
        who = f"rank {silent[0]} of two" if silent else "a single rank"
        return [Check("ranks", False, f"{who} did not start", _CURES["ranks"])]
    first = pair[0]
    checks = [Check("ranks", True, f"2 on {first['device']}, {first['threads']} thread(s) each")]
    checks.append(_of_all("collectives", pair))
    checks.append(_compare_steps(alone[0], pair))
    checks.append(_of_all("checkpoint", pair))
    return checks


def _of_all(name: str, reports: Sequence[Mapping[str, Any]]) -> Check:
    problems = [
        f"rank {rank}: {problem}"
        for rank, report in enumerate(reports)
        if (problem := report.get(name, {"problem": "it did not get there"})["problem"])
    ]
    if problems:
        return Check(name, False, "; ".join(problems), _CURES[name])
    return Check(name, True, str(reports[0][name]["found"]))


def _compare_steps(alone: Mapping[str, Any], pair: Sequence[Mapping[str, Any]]) -> Check:
    name = "training step"
    for where, report in (("TP1", alone), *((f"TP2, rank {i}", r) for i, r in enumerate(pair))):
        problem = report.get(name, {"problem": "it did not get there"})["problem"]
        if problem:
            return Check(name, False, f"{where}: {problem}", _CURES[name])
    ours, wanted = pair[-1][name], alone[name]
    found = ", ".join(
        f"{what} {wanted[key]:.6f} at TP1 and {ours[key]:.6f} at TP2"
        for what, key in (("loss", "loss"), ("gradient norm", "grad_norm"))
    )
    is_equal = are_close(ours, wanted)
    return Check(name, is_equal, found, "" if is_equal else _CURES[name])


def are_close(ours: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """Say whether two updates are one and the same but for rounding."""
    return all(
        math.isclose(ours[key], wanted[key], rel_tol=TOLERANCE) for key in ("loss", "grad_norm")
    )


def describe(checks: Sequence[Check], seconds: float) -> str:
    """Return the checks as text, one line each, with a cure under what is wrong."""
    lines = []
    for check in checks:
        lines.append(f"{'ok' if check.ok else 'WRONG':<6} {check.name:<14} {check.found}")
        if not check.ok:
            lines.append(f"{'':<6} {'cure:':<14} {check.cure}")
    wrong = sum(not check.ok for check in checks)
    verdict = f"{wrong} of {len(checks)} checks failed" if wrong else "all is in order"
    return "\n".join([*lines, f"{verdict} ({seconds:.0f} s)"])
