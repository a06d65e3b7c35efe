"""The process that test ranks are forked from: `python -m tests.helpers.rank_server FD`.

It imports what is slow to import, then answers calls from `tests.helpers.ranks` one at a time.
It must never run an operator of torch itself: threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.helpers.rank_messages import Call, Outcome, RankDiedError, RankTimeoutError, to_bytes

# After one rank has failed, its peers fail within moments, as its connections close. Those that
# do not are killed: they can only wait for the dead rank.
GRACE_SECONDS = 10.0

# How long a rank that hangs may take to write down its stacks.
STACKS_SECONDS = 10.0

PR_SET_PDEATHSIG = 1

PRELOADED = (
    "accelerate",
    "torch.distributed.checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tests.helpers.tiny_models",
)


def main(fd: int) -> None:
    """Answer calls until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    connection = Connection(fd)
    _preload()
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(to_bytes(_serve(request)))


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    try:
        # The engine decides here, once for all ranks, that Megatron runs on the CPU.
        importlib.import_module("accelerate_megatron.engine").activate("cpu")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
        importlib.import_module("megatron.core.optimizer")
    except Exception:  # tests that need no engine must run when it is broken
        traceback.print_exc()


def _serve(request: bytes) -> list[Outcome]:
    try:
        call: Call = pickle.loads(request)
        _extend_search_path(call.search_path)
    except Exception as error:  # the caller gets it, whatever the imports of its module raised
        return [Outcome(rank=-1, error=error, text=traceback.format_exc())]
    gc.collect()
    gc.freeze()  # the ranks' garbage collections then leave the shared pages alone
    # What a killed rank had started may still be writing there.
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        ranks = [_Rank(rank, call, Path(folder)) for rank in range(call.num_ranks)]
        outcomes = _collect(ranks, call)
    gc.unfreeze()
    return [outcomes[rank] for rank in range(call.num_ranks)]


def _extend_search_path(entries: list[str]) -> None:
    sys.path.extend(entry for entry in entries if entry not in sys.path)


class _Rank:
    """One forked rank, seen from the server."""

    def __init__(self, rank: int, call: Call, folder: Path) -> None:
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self._has_ended = False
        self.connection, rank_end = Pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of fork in a process with threads; torch's idle one holds no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_as_rank(rank, call, folder, rank_end, self.log)
        rank_end.close()

    def outcome(self) -> Outcome:
        """Return what the rank sent, or how it died. Call it when its pipe has something."""
        try:
            outcome: Outcome = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            error = RankDiedError(f"rank {self.rank} died: {_describe(self._end())}")
            outcome = Outcome(self.rank, error=error, text=self.tail())
        return outcome

    def let_go(self) -> None:
        """End the rank after its outcome was read."""
        if not self._has_ended:
            with contextlib.suppress(BrokenPipeError):
                self.connection.send_bytes(b"end")
            self._end()
        self.connection.close()

    def kill(self, reason: str) -> Outcome:
        """Let the rank write down its stacks and end, and say why."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_SECONDS
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._end(kill=True)
        text = self.tail()
        error = RankTimeoutError(f"rank {self.rank} {reason}\n{text}")
        return Outcome(self.rank, error=error, text=text, ended_at=time.monotonic())

    def _is_alive(self) -> bool:
        """Return whether the process runs; one that has ended is left to be waited for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def _end(self, *, kill: bool = False) -> int:
        """Wait for the process, end what it has started, and return its exit status."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self._has_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(status)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]


def _describe(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _collect(ranks: list[_Rank], call: Call) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting = {rank.connection: rank for rank in ranks}
    deadline = time.monotonic() + call.timeout
    reason = f"was still running after {call.timeout:g} s"
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            outcome = waiting.pop(connection).outcome()
            outcomes[outcome.rank] = outcome
            if outcome.error is not None and not call.wait_for_all:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                reason = f"was still running {GRACE_SECONDS:g} s after rank {outcome.rank} failed"
    for rank in waiting.values():
        outcomes[rank.rank] = rank.kill(reason)
    for rank in ranks:
        rank.let_go()
    return outcomes


def _run_as_rank(rank: int, call: Call, folder: Path, pipe: Connection, log: Path) -> None:
    """Be a rank: run the call, send its outcome, and end the process without cleaning up."""
    exit_status = 1
    try:
        _become_rank(rank, call, log)
        outcome = _call_function(rank, call, folder)
        pipe.send_bytes(_pickled(outcome))
        if outcome.error is None or call.wait_for_all:
            # Its peers may still be connecting to it, or reading what it sent. A rank that failed
            # leaves at once, so that its peers notice.
            pipe.recv_bytes()
        exit_status = 0
    except BaseException:  # nothing may unwind into the server's loop, of which this is a copy
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)


def _become_rank(rank: int, call: Call, log: Path) -> None:
    os.setpgid(0, 0)
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable()
    # Chained to the default, which ends the process: when it is gone, its stacks are all there.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(call.num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(call.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    os.environ.update(call.env)
    warnings.filterwarnings("error", module=r"(accelerate_megatron|tests)\b")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)


def _call_function(rank: int, call: Call, folder: Path) -> Outcome:
    try:
        if call.process_group:
            torch.distributed.init_process_group(
                "gloo",
                store=torch.distributed.FileStore(str(folder / "store"), call.num_ranks),
                rank=rank,
                world_size=call.num_ranks,
                timeout=timedelta(seconds=call.timeout),
            )
        value = call.function(*call.args)
    except Exception as error:  # whatever the function under test raises is the test's business
        ended_at = time.monotonic()  # before the traceback is written, which takes a while
        return Outcome(rank, error=error, text=traceback.format_exc(), ended_at=ended_at)
    return Outcome(rank, value=value)


def _pickled(outcome: Outcome) -> bytes:
    """Return `outcome` as bytes; an error that cannot be pickled or read back, as its text."""
    try:
        pickled = to_bytes(outcome)
        pickle.loads(pickled)
    except Exception as error:  # pickling runs code of whatever class the test returned
        what: Any = outcome.error if outcome.error is not None else outcome.value
        told = f"rank {outcome.rank} ended with a {type(what).__qualname__} that cannot be sent: "
        text = outcome.text or traceback.format_exc()
        reason = repr(outcome.error or error)
        outcome = Outcome(outcome.rank, text=text, ended_at=outcome.ended_at)
        outcome.error = RuntimeError(told + reason)
        return to_bytes(outcome)
    return pickled


def _die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
