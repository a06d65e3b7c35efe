"""`FaultPolicy`: what a job does when something goes wrong while it trains. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelerate_megatron.errors import ConfigurationError

_NON_FINITE = ("stop", "skip")


@dataclass(frozen=True, kw_only=True)
class FaultPolicy:
    """What a job does about faults; given as `Accelerator(faults=FaultPolicy(...))`."""

    non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient norm that is not finite: "stop" raises NonFiniteError on every rank,
    "skip" leaves the update out on every rank. Either way the weights stay as they are. With fp16
    the loss scaler leaves out updates whose gradients overflow, and goes on."""
    hang_seconds: float | None = 1800.0
    """How long one rank may take to fetch a batch, or one update or call of `megatron_generate` may
    take, until the job is taken for stuck: each rank shows where it is and ends. None: no limit."""
    save_on_sigterm: bool = True
    """Whether SIGTERM lets the step end, saves a checkpoint and ends the job with status 0. Needs
    checkpoints that are named automatically; without them SIGTERM ends the process at once."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: One is not allowed.
        """
        if self.non_finite not in _NON_FINITE:
            raise ConfigurationError(
                f"FaultPolicy.non_finite is {self.non_finite!r}; it must be one of "
                f"{', '.join(_NON_FINITE)}."
            )
        if self.hang_seconds is not None and self.hang_seconds <= 0:
            raise ConfigurationError(
                f"FaultPolicy.hang_seconds is {self.hang_seconds}; it must be more than 0, or None "
                "for no limit."
            )
