"""Puts known faults into a copy of the sources, one at a time; for each some test has to fail.

    python tools/mutants.py [--only WORDS ...] [--handful N] [--list]

A test suite that lets a fault pass says nothing about it. Each fault of `mutant_faults.py` names
the tests that are to notice it, and only these are run; first without any fault, when all have to
pass. --handful N takes N faults, other ones each day. Exits with 1 when a fault was not noticed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mutant_faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src") / "accelerate_megatron"
ALL_PASSED, SOME_FAILED = 0, 1  # pytest's exit statuses; others say that no test was run
SECONDS = 1800


def main() -> int:
    args = parse_args()
    faults = chosen(args.only, args.handful)
    if args.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    if not faults:
        print(f"No fault's name contains {' or '.join(map(repr, args.only))}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder))
        tests = sorted({test for fault in faults for test in fault.tests})
        status, output = run(tests, copy)
        if status != ALL_PASSED:
            print(f"{output}\nThe tests do not pass without any fault.", file=sys.stderr)
            return 2
        print(f"without a fault: {output.strip().splitlines()[-1]}", flush=True)
        missed = [fault for fault in faults if not is_noticed(fault, copy)]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults noticed")
    return int(bool(missed))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of faults")
    parser.add_argument("--handful", type=int, help="so many faults, other ones each day")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    return parser.parse_args()


def chosen(only: Sequence[str], handful: int | None) -> list[Fault]:
    """Return the faults to try: those named, and of them today's handful."""
    faults = [fault for fault in FAULTS if not only or any(word in fault.name for word in only)]
    if handful is None or not faults:
        return faults
    first = datetime.date.today().toordinal() * handful
    return [faults[(first + i) % len(faults)] for i in range(min(handful, len(faults)))]


def copied(folder: Path) -> Path:
    """Copy what tests read into `folder`; return it."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def is_noticed(fault: Fault, copy: Path) -> bool:
    """Run the fault's tests with it; say whether any failed."""
    started = time.perf_counter()
    with applied(fault, copy):
        status, output = run(fault.tests, copy)
    seconds = time.perf_counter() - started
    if status not in (ALL_PASSED, SOME_FAILED):
        print(output, file=sys.stderr)
    noticed = status == SOME_FAILED
    verdict = "noticed" if noticed else "NOT NOTICED"
    print(f"{verdict:12} {fault.name} ({fault.file}, {seconds:.0f} s)", flush=True)
    return noticed


@contextmanager
def applied(fault: Fault, root: Path) -> Iterator[None]:
    """Put a fault into the sources below `root` for the time of the block.

    Raises:
        ValueError: The text that it replaces is not there exactly once, or what comes of it is no
            Python.
    """
    path = root / PACKAGE / fault.file
    text = path.read_text()
    if text.count(fault.before) != 1:
        raise ValueError(
            f"{fault.name!r} replaces a text that is in {fault.file} {text.count(fault.before)} "
            "times, not once; adapt it to the source."
        )
    changed = text.replace(fault.before, fault.after)
    compile(changed, fault.file, "exec")
    path.write_text(changed)
    try:
        yield
    finally:
        path.write_text(text)


def run(tests: Sequence[str], root: Path) -> tuple[int, str]:
    """Run tests until the first one fails; return pytest's exit status and what it printed."""
    job = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": str(root / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    return job.returncode, job.stdout


if __name__ == "__main__":
    sys.exit(main())
