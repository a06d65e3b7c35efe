"""The optimizer that `prepare` returns."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_megatron.training.session import TrainingSession


class PreparedOptimizer(torch.optim.Optimizer):
    """Megatron's optimizer as a training loop sees it.

    `step()` and `zero_grad()` have nothing left to do: both happen inside
    `model(**batch)`.
    """

    def __init__(self, session: TrainingSession) -> None:  # not super(): Megatron holds the state
        self.session = session

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """This rank's parameter groups, with the rates of the next update."""
        groups: list[dict[str, Any]] = self.session.optimizer.param_groups
        return groups

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was left out because of a gradient that is not finite."""
        return self.session.step_was_skipped

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing but note the call; the update was made by `model(**batch)`."""
        self.session.loop.after_update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing; gradients are cleared before each update."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state."""
        state: dict[str, Any] = self.session.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank, in the same layout."""
        self.session.optimizer.load_state_dict(state_dict)
