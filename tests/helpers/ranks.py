"""Runs a function on several real gloo ranks and hands back what each of them returned.

The ranks are forked from one server process, which is started once and has torch, transformers,
accelerate and Megatron-Core imported already: a call costs tens of milliseconds instead of the
seconds of its imports, and each call still finds a process in which nothing ran before it. No
state of one test can reach the next one.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.helpers.rank_messages import (
    Call,
    Outcome,
    RankDiedError,
    RankFailedError,
    RankTimeoutError,
    to_bytes,
)

REPOSITORY = Path(__file__).resolve().parents[2]

# What the server may need on top of a call's own timeout: its imports, and ending stuck ranks.
START_SECONDS = 120.0

# That of the session: what a test sets must not stay with a server that it happens to start.
ENVIRONMENT = dict(os.environ)


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    timeout: float = 150.0,
    errors: str = "raise",
    env: Mapping[str, str] | None = None,
    process_group: bool = True,
) -> list[Any]:
    """Call `function(*args)` on `num_ranks` ranks at once; return their results in rank order.

    Each rank is a process of its own with one torch thread, the usual environment variables
    (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), torch seeded with 0 and, unless
    `process_group` is false, an initialised gloo process group whose store is a file. Its
    timeout is that of the call.

    Args:
        function: A function at the top of a module that can be imported, or a partial of one.
        *args: Anything that can be pickled; tensors too.
        num_ranks: How many ranks.
        timeout: Seconds until the ranks that still run are killed and their stacks shown.
        errors: "raise" raises the error of the rank that failed first, caused by a RankFailedError
            that holds its traceback. "return" puts each rank's exception in its place in the
            list: for tests of what every rank says.
        env: More environment variables for the ranks.
        process_group: False for code that makes its own process group.

    Raises:
        RankTimeoutError: Not every rank ended in time.
        RankDiedError: A rank died (a signal, or os._exit).
    """
    call = Call(
        function=function,
        args=args,
        num_ranks=num_ranks,
        timeout=timeout,
        wait_for_all=errors == "return",
        env=dict(env or {}),
        process_group=process_group,
        search_path=[entry or os.getcwd() for entry in sys.path],
    )
    outcomes = _server().ask(call)
    if errors == "raise":
        _raise_first_failure(outcomes)
    return [outcome.error or outcome.value for outcome in outcomes]


def _raise_first_failure(outcomes: list[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        # A rank that died left no time, and nothing that its peers then raise is the cause.
        first = min(failed, key=lambda outcome: outcome.ended_at)
        assert first.error is not None
        raise first.error from RankFailedError(f"rank {first.rank} failed:\n{first.text}")


class _RankServer:
    """The process the ranks are forked from, and the pipe to it."""

    def __init__(self) -> None:
        here, there = Pipe()
        self._connection: Connection = here
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.rank_server", str(there.fileno())],
            pass_fds=[there.fileno()],
            cwd=REPOSITORY,
            env={**ENVIRONMENT, **_server_environment()},
        )
        there.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, call: Call) -> list[Outcome]:
        try:
            self._connection.send_bytes(to_bytes(call))
            if not self._connection.poll(call.timeout + START_SECONDS):
                raise RankTimeoutError(
                    f"the rank server did not answer within {call.timeout} s + start"
                )
            reply = self._connection.recv_bytes()
        except BaseException as error:
            # Also for Ctrl-C and for pytest-timeout: the ranks must not outlive the test.
            self.stop()
            if isinstance(error, EOFError):
                raise RankDiedError("the rank server died; its output is above") from error
            raise
        outcomes: list[Outcome] = pickle.loads(reply)
        return outcomes

    def stop(self) -> None:
        self._connection.close()
        if self.is_running:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _server_environment() -> dict[str, str]:
    search_path = [str(REPOSITORY / "src"), str(REPOSITORY), ENVIRONMENT.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(entry for entry in search_path if entry),
        # One thread for each rank: a team of spinning threads per rank makes steps take seconds.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Gloo would otherwise look up the host's name, which a machine off the net may not have.
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


_running: list[_RankServer] = []


def _server() -> _RankServer:
    if not _running or not _running[0].is_running:
        stop_ranks()
        _running.append(_RankServer())
    return _running[0]


def stop_ranks() -> None:
    """End the server process, if one runs. The next `run_ranks` starts another."""
    while _running:
        _running.pop().stop()


atexit.register(stop_ranks)
