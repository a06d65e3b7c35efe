"""Where in the data a loader is: kept in checkpoints, and found again, in mid-epoch too.

An epoch is continued by starting it again from the random states it was started from, and fetching
and dropping what was used. That is exact for any dataset whose samples depend on nothing but its
own state at the start and random numbers, and takes as long as fetching does.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from accelerate_megatron.data.epoch import EpochStarter, FetchingEpoch
from accelerate_megatron.data.order import generators_of, samplers_of, set_epoch
from accelerate_megatron.data.randomness import capture_state, restore_state
from accelerate_megatron.errors import ConfigurationError


class LoaderPosition:
    """Starts the epochs of one loader, and knows how far the current one is."""

    def __init__(
        self, dataloader: DataLoader[Any], starter: EpochStarter, *, samples_per_step: int
    ) -> None:
        """Stand before the first epoch.

        Args:
            dataloader: The user's.
            starter: Starts an epoch on this rank.
            samples_per_step: Samples that all replicas take in one step.
        """
        self._dataloader = dataloader
        self._starter = starter
        self._samples_per_step = samples_per_step
        self._epoch: FetchingEpoch | None = None
        self._start: dict[str, Any] | None = None
        self._resumed: dict[str, Any] | None = None
        self._skip = 0
        self._announced: int | None = None
        self.num_steps = 0
        """Steps of the current epoch that were given out."""

    def announce(self, epoch: int) -> None:
        """Tell the number of the epoch to the dataset and the samplers."""
        self._announced = epoch
        set_epoch(self._dataloader, epoch)

    def skip_to(self, num_steps: int) -> None:
        """Let the next epoch, or the one that is continued, begin with step `num_steps`."""
        if self._resumed is not None and self._resumed["num_steps"] != num_steps:
            self._resumed = {**self._resumed, "num_steps": num_steps, "boundary": None}
        elif self._resumed is None:
            self._skip = num_steps

    def begin(self) -> FetchingEpoch | None:
        """Start the next epoch, or go on in the one that was loaded. Every rank calls it."""
        resumed, self._resumed = self._resumed, None
        skip, self._skip = self._skip, 0
        if resumed is not None:
            return self._continue(resumed)
        self._start = {"random": capture_state(), **self._own_state()}
        self._epoch = self._starter.start()
        if skip and self._epoch is not None:
            self._epoch.skip(skip, None)
        self.num_steps = skip
        return self._epoch

    def end(self) -> None:
        """Note that the epoch is over, or was left."""
        self._start = None
        self._epoch = None
        self.num_steps = 0

    def _continue(self, resumed: dict[str, Any]) -> FetchingEpoch | None:
        outside = capture_state()
        self._start = resumed["start"]
        restore_state(self._start["random"])
        self._set_own_state(self._start)
        self._epoch = self._starter.start()
        if self._epoch is not None:
            self._epoch.skip(resumed["num_steps"], resumed["boundary"])
        restore_state(outside)
        self.num_steps = resumed["num_steps"]
        return self._epoch

    def state_dict(self, *, is_last_step: bool) -> dict[str, Any]:
        """Return the position; "boundary" is this rank's own, the rest counts for all.

        Args:
            is_last_step: Whether the step that was given out last ends the epoch.
        """
        num_steps, start, boundary = 0, self._own_state(), None
        if self._resumed is not None:
            num_steps, start, boundary = (
                self._resumed[name] for name in ("num_steps", "start", "boundary")
            )
        elif self._start is not None and self.num_steps > 0 and not is_last_step:
            num_steps, start = self.num_steps, self._start
            boundary = None if self._epoch is None else self._epoch.boundary
        return {
            "announced": self._announced,
            "samples": num_steps * self._samples_per_step,
            "start": start,
            "boundary": boundary,
        }

    def check(self, samples: int) -> None:
        """Refuse a position after `samples` samples of an epoch that no step of today ends at.

        Raises:
            ConfigurationError: They are no whole number of today's steps.
        """
        if samples % self._samples_per_step:
            raise ConfigurationError(
                f"The checkpoint was saved after {samples} samples of the epoch, which is no "
                f"multiple of the {self._samples_per_step} samples of one step now: keep the "
                "global batch (micro-batch x num_micro_batches x data-parallel ranks) of the run "
                "that saved it, or one that divides the number."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a position over; the next epoch begins there. Errors as `check`."""
        samples = state["samples"]
        self.check(samples)
        if state["announced"] is not None:
            self.announce(state["announced"])
        self.end()
        self._resumed = None
        if samples:
            self._resumed = {
                "start": state["start"],
                "num_steps": samples // self._samples_per_step,
                "boundary": state["boundary"],
            }
        else:
            self._set_own_state(state["start"])

    def _own_state(self) -> dict[str, Any]:
        """Return what moves from epoch to epoch besides the global generators."""
        return {
            "num_started": self._starter.num_started,
            "generators": [g.get_state() for g in generators_of(self._dataloader)],
            "samplers": [sampler.state_dict() for sampler in self._stateful_samplers()],
        }

    def _set_own_state(self, state: dict[str, Any]) -> None:
        self._starter.num_started = state["num_started"]
        for generator, saved in zip(
            generators_of(self._dataloader), state["generators"], strict=False
        ):
            generator.set_state(saved)
        for sampler, saved in zip(self._stateful_samplers(), state["samplers"], strict=False):
            sampler.load_state_dict(saved)

    def _stateful_samplers(self) -> list[Any]:
        return [
            sampler
            for sampler in samplers_of(self._dataloader)
            if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        ]
