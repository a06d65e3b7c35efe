"""Ends a job that is stuck, and says which rank it waits for and where that rank is.

Every rank notes what it does. When one thing takes too long, each rank tells the others through the
rendezvous store what it is at, shows its stacks, and ends; with one rank gone the launcher ends the
rest. A rank that cannot even run a thread, since it holds Python's lock, is ended by a timer of C.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

EXIT_STATUS = 75
"""Of a rank that ended because the job was stuck (EX_TEMPFAIL: trying again may help)."""

WAITING = "waiting for the other ranks"
"""What a rank is at that waits in a collective: another one is to blame."""

_TELLING_SECONDS = 2.0
_GRACE_SECONDS = 15.0


class Watchdog:
    """Watches this rank, in a thread of its own."""

    def __init__(self, seconds: float, *, store: Any, rank: int, num_ranks: int) -> None:
        """Start watching.

        Args:
            seconds: How long one thing may take.
            store: The rendezvous store of the job.
            rank: This rank.
            num_ranks: How many there are.
        """
        self._seconds = seconds
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._doing: tuple[str, float] | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Let the block take `seconds` at most. Not to be nested."""
        self._doing = (what, time.monotonic())
        faulthandler.dump_traceback_later(
            self._seconds + _GRACE_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr
        )
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._doing = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._seconds / 4, 1.0))
            doing = self._doing
            if doing is not None and time.monotonic() - doing[1] > self._seconds:
                self._end(doing[0])

    def _end(self, what: str) -> None:
        stream = sys.__stderr__ or sys.stderr  # logging may be what hangs
        others = self._tell(what)
        stream.write(
            f"accelerate-megatron: the job is stuck. Rank {self._rank} has been {what} for "
            f"{self._seconds:g} s.{others} Its stacks:\n"
        )
        for line in _stacks():
            # Each in one piece: the other ranks write to the same place at this moment.
            stream.write(f"rank {self._rank}: {line}\n")
        stream.flush()
        os._exit(EXIT_STATUS)

    def _tell(self, what: str) -> str:
        """Tell the other ranks what this one is at; return what they say."""
        try:
            self._store.set(f"watchdog/{self._rank}", what)
            deadline = time.monotonic() + _TELLING_SECONDS
            told = {rank: self._ask(rank, deadline) for rank in range(self._num_ranks)}
        except RuntimeError as error:  # the store's rank is gone
            return f" The other ranks cannot be asked ({error})."
        silent = [rank for rank, said in told.items() if said is None]
        busy = {rank: said for rank, said in told.items() if said not in (None, WAITING)}
        parts = [f" Rank {rank} is {said}." for rank, said in busy.items() if rank != self._rank]
        if silent:
            parts.append(f" No answer from rank {', '.join(map(str, silent))}.")
        return "".join(parts)

    def _ask(self, rank: int, deadline: float) -> str | None:
        key = f"watchdog/{rank}"
        left = max(deadline - time.monotonic(), 0.05)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError:  # what a store raises when its time is over
            return None
        text: bytes = self._store.get(key)
        return text.decode()


def _stacks() -> list[str]:
    """Return the stacks of all threads, in lines; from memory, for a disk may be what hangs."""
    with os.fdopen(os.memfd_create("stacks"), "r+b") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").splitlines()
