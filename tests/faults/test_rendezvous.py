"""Ranks that do not meet: an error in bounded time, with what to look at."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from tests.faults.test_jobs import ENV, REPOSITORY

pytestmark = pytest.mark.slow

SCRIPT = """
from datetime import timedelta
from accelerate.utils import InitProcessGroupKwargs
from accelerate_megatron import Accelerator

Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
"""


def _free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.mark.parametrize("rank", [0, 1], ids=["a rank never starts", "nobody at the address"])
def test_ranks_that_do_not_meet_are_told_what_to_look_at(rank: int) -> None:
    port = _free_port()
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    begun = time.monotonic()

    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **{name: value for name, value in ENV.items() if not name.startswith("TORCHELASTIC")},
            **ranks,
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert result.returncode == 1, result.stderr[-3000:]
    assert f"Rank {rank} did not meet all 2 ranks at 127.0.0.1:{port}" in result.stderr
    assert "InitProcessGroupKwargs(timeout=...)" in result.stderr
    assert time.monotonic() - begun < 90
