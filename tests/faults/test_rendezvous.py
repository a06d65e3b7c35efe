"""Ranks that do not meet: an error in bounded time, with what to look at."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.test_jobs import ENV, REPOSITORY
from tests.helpers.ports import held_port

pytestmark = pytest.mark.slow

SCRIPT = """
from datetime import timedelta
from accelerate.utils import InitProcessGroupKwargs
from accelerate_megatron import Accelerator

Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
"""


@pytest.mark.parametrize("rank", [0, 1], ids=["a rank never starts", "nobody at the address"])
def test_ranks_that_do_not_meet_are_told_what_to_look_at(rank: int) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}

    with held_port() as port:
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={
                **{name: word for name, word in ENV.items() if not name.startswith("TORCHELASTIC")},
                **ranks,
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=250,
        )

    assert result.returncode == 1, result.stderr[-3000:]
    assert f"Rank {rank} did not meet all 2 ranks at 127.0.0.1:{port}" in result.stderr
    assert "InitProcessGroupKwargs(timeout=...)" in result.stderr
