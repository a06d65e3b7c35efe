"""Which rank's failure ended a job: of several that torchrun sees at once, the cause."""

from __future__ import annotations

import signal

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accelerate_megatron.faults.watchdog import EXIT_STATUS

_AT_ONCE_SECONDS = 1
"""torchrun looks at its ranks ten times a second, and notes whole seconds. Later come those that it
has ended itself."""

_MADE_BY_A_PEER = (-signal.SIGABRT, -signal.SIGTERM, -signal.SIGINT)
"""Signals that end a rank whose peer is gone: its backend's, and torchrun's."""


class JobFailedError(ChildFailedError):
    """The failed ranks of a job, the one to blame apart from those that failed for want of it.

    torchrun blames the first one that it sees. A rank that loses its peer in a collective raises,
    soon enough to be seen together with it.
    """

    def __init__(self, error: ChildFailedError) -> None:
        """Take over what torchrun has seen."""
        super().__init__(error.name, error.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return rank and failure of the one to blame."""
        first = min(failure.timestamp for failure in self.failures.values())
        for rank, failure in self.failures.items():
            if _is_a_cause(failure.exitcode) and failure.timestamp <= first + _AT_ONCE_SECONDS:
                return rank, failure
        found: tuple[int, ProcessFailure] = super().get_first_failure()
        return found


def _is_a_cause(exitcode: int) -> bool:
    """Return whether no peer can have made a rank end so: killed, or ended as stuck."""
    return exitcode == EXIT_STATUS or (exitcode < 0 and exitcode not in _MADE_BY_A_PEER)
