"""The learning-rate scheduler: the stand-in that a script gives, and what `prepare` returns."""

from __future__ import annotations

from typing import Any

from accelerate.utils import MegatronLMDummyScheduler as UpstreamDummyScheduler


class MegatronLMDummyScheduler(UpstreamDummyScheduler):  # type: ignore[misc]  # accelerate is untyped
    """Stands for Megatron's own scheduler in a script; `prepare` returns the real one.

    Args:
        optimizer: The optimizer, as any scheduler is given it.
        total_num_steps: Batches of the DataLoader before `prepare`, over the whole training.
        warmup_num_steps: Those of them over which the rate rises.
        **kwargs: Kept as an attribute.
    """


class PreparedScheduler:
    """Megatron's scheduler as a training loop sees it.

    `step()` has nothing left to do: the scheduler advances inside `model(**batch)`, with
    the update.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing; the rate moved with the update."""

    def get_last_lr(self) -> list[float]:
        """Return the rate that the next update will use, one for each of the optimizer's groups.

        A group that `scale_lr_cond` divides has the rate of its parameters that are not scaled.
        """
        rates: dict[int, tuple[bool, float]] = {}
        for group in self.scheduler.optimizer.param_groups:
            is_scaled = group["lr_factor"] != 1.0
            index, rate = group["user_group"], (is_scaled, float(group["lr"]))
            rates[index] = min(rates.get(index, rate), rate)
        return [rate for _, (_, rate) in sorted(rates.items())]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state over; Megatron's own adds the steps done to those already there."""
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state_dict)
