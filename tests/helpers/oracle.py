"""The oracle: what plain transformers and torch give for a model, an optimizer and batches.

Its process never imports accelerate_megatron or megatron, and says so with every answer. It is
started once per test session and keeps its answers, so that all layouts share one run.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.helpers.oracle_training import OracleCase, OracleRun
from tests.helpers.rank_messages import to_bytes
from tests.helpers.ranks import ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 270.0

_answers: dict[bytes, OracleRun] = {}
_running: list[tuple[subprocess.Popen[bytes], Any]] = []


def oracle_run(case: OracleCase) -> OracleRun:
    """Return what training `case` gives in one process of plain PyTorch.

    Raises:
        RuntimeError: The oracle failed, or something of ours was imported in its process.
    """
    question = to_bytes(case)
    if question not in _answers:
        answer = _ask(question)
        if isinstance(answer, str):
            raise RuntimeError(f"the oracle failed:\n{answer}")
        _answers[question] = answer
    return _answers[question]


def _ask(question: bytes) -> OracleRun | str:
    if not _running:
        _start()
    _, connection = _running[0]
    connection.send_bytes(question)
    try:
        if not connection.poll(TIMEOUT_SECONDS):
            raise TimeoutError(f"the oracle did not answer within {TIMEOUT_SECONDS:g} s")
        answer: OracleRun | str = pickle.loads(connection.recv_bytes())
    except BaseException:
        stop_oracle()
        raise
    return answer


def _start() -> None:
    here, there = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.oracle_training", str(there.fileno())],
        pass_fds=[there.fileno()],
        cwd=REPOSITORY,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    there.close()
    _running.append((process, here))


def stop_oracle() -> None:
    """End the oracle's process, if it runs."""
    while _running:
        process, connection = _running.pop()
        connection.close()
        process.kill()
        process.wait()


atexit.register(stop_oracle)
