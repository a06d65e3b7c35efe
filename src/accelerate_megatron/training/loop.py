"""What a training loop can get wrong without any call of its own failing."""

from __future__ import annotations

import logging

from accelerate_megatron.log import get_logger, log_once

logger = get_logger(__name__)


class LoopWatch:
    """Follows the calls of a loop; says at the next call, once, what had another effect than meant.

    `model(**batch)` in training mode is a whole update, `optimizer.step()` has nothing left to do.
    A loop of plain PyTorch that calls one of them more often than the other means something else.
    """

    def __init__(self) -> None:
        self._is_unstepped = False
        self._had_update = False

    def before_update(self, *, rate_has_ended: bool = False) -> None:
        """Note that `model(**batch)` is about to make an update.

        Args:
            rate_has_ended: Whether the schedule is over and its last rate is 0.
        """
        if rate_has_ended:
            log_once(
                logger,
                "The learning-rate schedule is over and the rate is 0: this update and all after "
                "it change nothing. If the training is meant to go on: total_num_steps of "
                "MegatronLMDummyScheduler counts batches of the DataLoader before prepare; for a "
                "number of updates, set MegatronLMPlugin(train_iters=...), or --train_iters.",
                level=logging.WARNING,
            )
        if self._is_unstepped:
            log_once(
                logger,
                "model(**batch) was called in training mode again without optimizer.step() in "
                "between. Each such call is an update of its own: gradients are not added up over "
                "calls. To accumulate, set num_micro_batches (or gradient_accumulation_steps); to "
                "look at a loss only, call model.eval() or use torch.no_grad().",
                level=logging.WARNING,
            )
        self._is_unstepped = True
        self._had_update = True

    def after_update(self) -> None:
        """Note `optimizer.step()`."""
        if not self._is_unstepped:
            before = "again without" if self._had_update else "before any"
            log_once(
                logger,
                f"optimizer.step() was called {before} model(**batch) in training mode, which "
                "is what makes the update: this step changed nothing.",
                level=logging.WARNING,
            )
        self._is_unstepped = False
