"""`benchmarks/weights.py` at its smallest: both ranks import and export what was written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "weights.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_rank_reports_its_memory_and_its_times() -> None:
    job = subprocess.run(
        [sys.executable, BENCHMARK, "--size=tiny", "--json"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr[-4000:]
    ranks = json.loads(job.stdout)

    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["parameters_mb"] > rank["largest_slice_mb"] > 0
        assert rank["import_seconds"] > 0
        assert rank["plain_read_seconds"] > 0
    assert ranks[-1]["export_seconds"] > 0
    assert ranks[-1]["plain_write_seconds"] > 0
