"""The faults of tools/mutants.py still fit the sources, and the tests they name are there."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import mutants

    return mutants


def test_every_fault_fits_its_file_and_is_taken_back(mutants: Any, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))

    for fault in mutants.FAULTS:
        file = tmp_path / mutants.PACKAGE / fault.file
        before = file.read_text()
        with mutants.applied(fault, tmp_path):
            assert file.read_text() != before
        assert file.read_text() == before


def test_a_fault_that_no_longer_fits_is_named(mutants: Any, tmp_path: Path) -> None:
    fault = mutants.Fault("nothing", "errors.py", "no such text", "", ())
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))

    with (
        pytest.raises(ValueError, match=r"'nothing' replaces a text that is in errors.py 0 times"),
        mutants.applied(fault, tmp_path),
    ):
        pass


def test_there_are_twenty_five_faults_and_each_names_tests_that_exist(mutants: Any) -> None:
    names = [fault.name for fault in mutants.FAULTS]

    assert len(names) == len(set(names)) >= 25
    for fault in mutants.FAULTS:
        assert fault.tests, fault.name
        for test in fault.tests:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text()
            assert not function or re.search(rf"^def {function.split('[')[0]}\(", text, re.M), test


def test_a_handful_is_another_one_each_day(mutants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    days = -(-len(mutants.FAULTS) // 3)
    for day in range(days):

        class Date(datetime.date):
            @classmethod
            def today(cls, day: int = day) -> datetime.date:
                return datetime.date.fromordinal(739000 + day)

        monkeypatch.setattr(mutants.datetime, "date", Date)
        handful = mutants.chosen([], 3)
        assert len({fault.name for fault in handful}) == 3
        seen |= {fault.name for fault in handful}

    assert len(seen) == len(mutants.FAULTS)


@pytest.mark.slow
def test_pytest_finds_each_test_that_a_fault_names(mutants: Any) -> None:
    """Each day tries a few faults: a name that is gone would be noticed on one of them."""
    tests = sorted({test for fault in mutants.FAULTS for test in fault.tests})

    job = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
