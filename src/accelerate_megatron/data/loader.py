"""The DataLoader that `prepare` returns: one batch per step, the same on all ranks of a replica.

One step, on every rank:
  1. the fetching rank of each replica takes its micro-batches, joins and checks them (`epoch`);
  2. the fetching ranks tell each other how that went, and agree (`verdict`);
  3. each sends the outcome, with the batch, to the ranks of its replica (`broadcast`);
  4. every rank yields the batch, or ends, or raises, and all do the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_megatron.data.broadcast import broadcast_value, pack_value, to_device
from accelerate_megatron.data.checks import BatchLimits, RealPart, mark_checked, mark_real_part
from accelerate_megatron.data.collate import BatchShape
from accelerate_megatron.data.epoch import EpochStarter, FetchingEpoch
from accelerate_megatron.data.order import check_dataloader, micro_batch_size_of
from accelerate_megatron.data.position import LoaderPosition
from accelerate_megatron.data.replica import ReplicaPlace
from accelerate_megatron.data.verdict import Outcome, Verdicts
from accelerate_megatron.errors import BatchError, ConfigurationError
from accelerate_megatron.faults.watchdog import WAITING
from accelerate_megatron.log import get_logger, log_once

logger = get_logger(__name__)


def _unwatched(_what: str) -> AbstractContextManager[None]:
    return nullcontext()


class MegatronDataLoader:
    """Gives every rank the batches of its replica: dicts of tensors [num_micro_batches x b, s].

    Batch i of the wrapped DataLoader goes to data-parallel rank i mod dp_size; one step takes
    `num_micro_batches` of them. When replicas run out at different times, those without data get
    batches that carry no weight, so that every sample is used once and no rank waits for ever.

    Every rank must iterate it, over the same DataLoader. Until then nothing is fetched and no
    random number drawn.

    Attributes:
        dataloader: The DataLoader that was wrapped.
        num_real_rows: How many of the current batch's rows come from the data on this replica; the
            rows after them are filler.
        end_of_dataloader: Whether the current batch is the last one of the epoch.
        after_step: Called on every rank when the loop has used a batch and wants the next one.
        watch: Entered around what may hang, with what it is: see `faults.watchdog`.
    """

    def __init__(
        self,
        dataloader: DataLoader[Any],
        *,
        groups: ReplicaPlace,
        shape: BatchShape,
        limits: BatchLimits,
        device: torch.device,
    ) -> None:
        """Wrap `dataloader`. Communicates with nobody.

        Args:
            dataloader: The user's; it is not changed.
            groups: This rank's place among those that share the data.
            shape: Micro-batches of a step, rows of a micro-batch, padding.
            limits: What the model takes.
            device: Where the batches are wanted.

        Raises:
            ConfigurationError: The DataLoader has no batch size, has one larger than the
                micro-batch, or splits the data itself.
        """
        check_dataloader(dataloader)
        if micro_batch_size_of(dataloader) > shape.micro_batch_size:
            raise ConfigurationError(
                f"The DataLoader's batch size is {micro_batch_size_of(dataloader)}, but the "
                f"micro-batch has {shape.micro_batch_size} rows. Give the DataLoader "
                f"batch_size={shape.micro_batch_size} or less."
            )
        self.dataloader = dataloader
        self.num_real_rows = 0
        self.end_of_dataloader = False
        self._groups = groups
        self._shape = shape
        self._device = device
        self.after_step: Callable[[], None] | None = None
        self.watch: Callable[[str], AbstractContextManager[None]] = _unwatched
        starter = EpochStarter(dataloader, groups, shape=shape, limits=limits, device=device)
        self._position = LoaderPosition(dataloader, starter, samples_per_step=self.total_batch_size)
        self._verdicts = Verdicts(groups, device)

    @property
    def dataset(self) -> Any:
        """The dataset of the wrapped DataLoader."""
        return self.dataloader.dataset

    @property
    def sampler(self) -> Any:
        """The sampler of the wrapped DataLoader."""
        return self.dataloader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the wrapped DataLoader."""
        return self.dataloader.batch_sampler

    @property
    def batch_size(self) -> int:
        """Rows of a batch on one replica: num_micro_batches x micro-batch."""
        return self._shape.rows

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch on all replicas together: the samples of one update."""
        return self._shape.rows * self._groups.dp_size

    def __len__(self) -> int:
        """Return the number of steps of an epoch, a short last one included.

        Raises:
            TypeError: The dataset is iterable and has no length.
        """
        batches_per_step = self._groups.dp_size * self._shape.num_micro_batches
        return math.ceil(len(self.dataloader) / batches_per_step)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset and the samplers that have a `set_epoch`."""
        self._position.announce(epoch)

    def skip_to(self, num_batches: int) -> None:
        """Let the next iteration begin with batch `num_batches` of its epoch, counted from 0.

        Every rank must call it. A position that was loaded from a checkpoint is in the epoch that
        is continued: the same number changes nothing.
        """
        self._position.skip_to(num_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, in tensors and plain values."""
        return self._position.state_dict(is_last_step=self.end_of_dataloader)

    def check_position(self, state: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would, and change nothing."""
        self._position.check(state["samples"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned: the next iteration goes on with the next batch.

        Every rank must call it, with the state of the first rank, but its own "boundary".

        Raises:
            ConfigurationError: The samples used are no whole number of today's steps.
        """
        self.end_of_dataloader = False
        self._position.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over one epoch. Every rank must do it, and stop at the same step.

        Raises:
            BatchError: A batch does not fit the model, or could not be fetched; on all ranks
                alike, except that a rank whose own dataset or collate_fn failed raises that error.
        """
        epoch = self._position.begin()
        self.end_of_dataloader = False
        try:
            yield from self._steps(epoch)
        finally:
            self._position.end()

    def _steps(self, epoch: FetchingEpoch | None) -> Iterator[dict[str, Any]]:
        while not self.end_of_dataloader:
            own_error = None
            outcome = None
            fetched = None
            if epoch is not None:
                with self.watch("fetching a batch"):
                    fetched = epoch.next_step()
                own_error = fetched.error
            with self.watch(WAITING):
                if fetched is not None:
                    outcome = self._verdicts.agree(fetched)
                outcome = self._share(outcome)
            if outcome.failure is not None:
                self.num_real_rows = 0
                if own_error is not None and not isinstance(own_error, BatchError):
                    raise own_error  # the script's own, with its traceback
                raise outcome.failure.exception() from own_error
            if outcome.values is None:
                return
            self.end_of_dataloader = outcome.is_last
            self.num_real_rows = outcome.num_real_rows
            self._report(outcome)
            for value in outcome.values.values():
                if isinstance(value, torch.Tensor):
                    mark_checked(value)
            part = RealPart(outcome.num_real_rows, outcome.longest)
            mark_real_part(outcome.values["input_ids"], part)
            self._position.num_steps += 1
            yield outcome.values
            if self.after_step is not None:
                self.after_step()

    def _share(self, outcome: Outcome | None) -> Outcome:
        """Return the fetching rank's outcome on every rank of the replica, on the device."""
        groups = self._groups
        if not groups.has_peers:
            assert outcome is not None
            return Outcome(*to_device(outcome.parts(), self._device))
        parts = broadcast_value(
            None if outcome is None else pack_value(outcome.parts()),
            source=groups.fetch_rank,
            group=groups.replica_group,
            device=self._device,
        )
        return Outcome(*parts)

    def _report(self, outcome: Outcome) -> None:
        shape = self._shape
        for name, length, longest in (
            ("seq_length", shape.seq_length, outcome.longest),
            ("decoder_seq_length", shape.decoder_seq_length, outcome.longest_decoded),
        ):
            if length is not None and longest > length:
                log_once(
                    logger,
                    f"Sequences longer than {name} = {length} are cut to it. This is said once.",
                )
        if outcome.warning is not None:
            log_once(logger, outcome.warning, level=logging.WARNING)
