"""Losses and gradients that are not finite: all ranks see them, and do the same."""

from __future__ import annotations

import math

from accelerate_megatron.errors import NonFiniteError
from accelerate_megatron.log import get_logger, is_logging_rank

logger = get_logger(__name__)


class FiniteGuard:
    """Decides whether an update is made. What it looks at is the same on every rank."""

    def __init__(self, policy: str) -> None:
        """Follow `policy`: "stop" or "skip"."""
        self.policy = policy

    def admits(self, what: str, value: float, num_updates: int) -> bool:
        """Return whether to go on with an update, given its `value` of `what`.

        Every rank calls it, first with the loss, then, where gradients were computed, with their
        norm: both are known before anything is changed.

        Raises:
            NonFiniteError: It is not finite and the policy is "stop".
        """
        if math.isfinite(value):
            return True
        if self.policy == "stop":
            raise NonFiniteError(
                f"In update {num_updates + 1} the {what} is {value}. The update was not made. Look "
                "at the data and the learning rate; FaultPolicy(non_finite='skip') leaves such "
                "updates out."
            )
        if is_logging_rank():
            logger.warning("Left out update %d: the %s is %s.", num_updates + 1, what, value)
        return False
