"""SIGTERM, and the processes that a script forks."""

from __future__ import annotations

import os
import signal
import time

from accelerate_megatron.faults.preemption import Preemption
from tests.helpers.ranks import run_ranks


def _terminate_a_forked_process() -> tuple[int, bool]:
    """Return how a forked process ends, and whether this one would save and end now."""
    preemption = Preemption(accelerator=None)
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), preemption._is_asked


def test_sigterm_ends_a_process_that_the_script_has_forked() -> None:
    """As multiprocessing ends the workers of a pool, and waits until they are gone."""
    ended = run_ranks(_terminate_a_forked_process, num_ranks=1, process_group=False, timeout=60)

    assert ended == [(-signal.SIGTERM, False)]
