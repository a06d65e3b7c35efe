"""Puts an `Accelerator`'s `FaultPolicy` to work on its session, its loaders and its process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.faults.policy import FaultPolicy
from accelerate_megatron.faults.preemption import Preemption
from accelerate_megatron.faults.watchdog import Watchdog

if TYPE_CHECKING:
    from accelerate_megatron.data.loader import MegatronDataLoader


class Guards:
    """The part of `Accelerator` that acts on faults.

    Attributes:
        faults: What the job does when something goes wrong.
    """

    faults: FaultPolicy
    _watchdog: Watchdog | None = None
    _preemption: Preemption | None = None

    def _take_faults(self, faults: object) -> None:
        """Take the policy that was given, or the usual one.

        Raises:
            ConfigurationError: It is something else.
        """
        if faults is not None and not isinstance(faults, FaultPolicy):
            raise ConfigurationError(
                f"faults is a {type(faults).__qualname__}; give "
                "accelerate_megatron.FaultPolicy(...)."
            )
        self.faults = faults or FaultPolicy()

    def _start_guards(self, session: Any) -> None:
        """Let the policy act on a session; what watches the whole process starts once."""
        session.guard.policy = self.faults.non_finite
        if self.faults.hang_seconds is not None:
            self._watchdog = self._watchdog or Watchdog(
                self.faults.hang_seconds,
                store=dist.distributed_c10d._get_default_store(),
                rank=dist.get_rank(),
                num_ranks=dist.get_world_size(),
            )
            session.watch = self._watchdog.watch

    def _guard_loader(self, loader: MegatronDataLoader) -> None:
        """Let the policy act on a prepared loader."""
        if self._watchdog is not None:
            loader.watch = self._watchdog.watch
        configuration: Any = getattr(self, "project_configuration", None)
        if self.faults.save_on_sigterm and configuration.automatic_checkpoint_naming:
            # Not before there is a loader: without one nobody would act on the signal.
            self._preemption = self._preemption or Preemption(self)
            loader.after_step = self._preemption.after_step
