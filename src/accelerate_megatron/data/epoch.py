"""One epoch on a rank that fetches: its batches step by step, and the random numbers behind them.

Nothing here raises what a dataset, a collate_fn or a check raises: a step that failed is returned
as such, because the other ranks are waiting to hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accelerate_megatron.data.broadcast import broadcast_value, pack_value, to_device
from accelerate_megatron.data.checks import BatchLimits, check_length, check_micro_batch, check_rows
from accelerate_megatron.data.collate import BatchShape, JoinedBatch, join_micro_batches
from accelerate_megatron.data.order import (
    EnterStream,
    OrderWitness,
    OwnPart,
    can_seek,
    generators_of,
    num_order_draws,
    splits_by_index,
)
from accelerate_megatron.data.randomness import (
    RandomState,
    RandomStream,
    capture_state,
    draw_from,
    draw_seed,
    restore_state,
    torch_state,
)
from accelerate_megatron.data.replica import ReplicaPlace


@dataclass(frozen=True, kw_only=True)
class FetchedStep:
    """What a fetching rank got for one step: a batch, an error, or neither at the end."""

    batch: JoinedBatch | None = None
    error: Exception | None = None
    has_more: bool = False
    """Whether a later step will have something on this rank."""
    checksum: int = -1
    """Of the order of batches up to this step's first one; -1 if this rank saw none."""


class FetchingEpoch:
    """Takes the micro-batches of one epoch from a DataLoader and joins them, step by step.

    It looks one micro-batch ahead, so that the last step is known to be the last one.
    """

    def __init__(
        self,
        start: Callable[[int], Iterator[Any]],
        *,
        stream: RandomStream,
        witness: OrderWitness,
        shape: BatchShape,
        limits: BatchLimits,
        must_be_sent: bool,
        can_seek: bool = False,
    ) -> None:
        """Note how to start; nothing is drawn and nothing fetched before the first step.

        Args:
            start: Starts the iteration of this rank's micro-batches, after leaving out the number
                of them that it is given.
            stream: Where the random numbers of dataset, sampler and collate_fn come from.
            witness: Knows the order of the batches.
            shape: The batch of one step.
            limits: What the model takes.
            must_be_sent: Whether other ranks get the batch, so that it has to be picklable.
            can_seek: Whether micro-batches can be left out without being fetched.
        """
        self._can_seek = can_seek
        self._start = start
        self._stream = stream
        self._witness = witness
        self._shape = shape
        self._limits = limits
        self._must_be_sent = must_be_sent
        self._micro_batches: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._error: Exception | None = None
        self._ended = False
        self._step = 0
        self.boundary: RandomState | None = None
        """The random state before the first micro-batch of the next step was fetched."""

    def skip(self, num_steps: int, boundary: RandomState | None) -> None:
        """Fetch the first steps and drop them, so that `next_step` gives the one after them.

        Whatever the samples draw is drawn again, also in the DataLoader's workers. Samples that
        draw nothing are not fetched.

        Args:
            num_steps: How many; nothing was fetched before.
            boundary: `boundary` of the epoch that is continued; None keeps what was drawn now.
        """
        number = num_steps * self._shape.num_micro_batches
        with self._stream.entered():
            try:
                self._micro_batches = self._start(number if self._can_seek else 0)
                for _ in range(0 if self._can_seek else number):
                    next(self._micro_batches, None)
                # The one that is looked ahead at had been fetched when the epoch was left, before
                # the user's loop went on drawing numbers.
                self.boundary = boundary or capture_state()
                restore_state(self.boundary)
                self._ahead.append(next(self._micro_batches))
            except StopIteration:
                self._ended = True
            except Exception as error:  # whatever a user's dataset or collate_fn raises
                self._error = error
                self._ended = True
        for step in range(num_steps):
            self._witness.checksum_at(step)
        self._step = num_steps

    def next_step(self) -> FetchedStep:
        """Fetch one step. Communicates with nobody."""
        with self._stream.entered():
            self._look_ahead()
        size = self._shape.num_micro_batches
        raw, self._ahead = self._ahead[:size], self._ahead[size:]
        checksum = self._witness.checksum_at(self._step)
        self._step += 1
        if len(raw) < size and self._error is not None:
            return FetchedStep(error=self._error, checksum=checksum)
        if not raw:
            return FetchedStep(checksum=checksum)
        has_more = bool(self._ahead) or self._error is not None
        try:
            batch = self._join(raw)
        except Exception as error:  # checks, or torch on what no check foresaw: all ranks must know
            return FetchedStep(error=error, checksum=checksum)
        return FetchedStep(batch=batch, has_more=has_more, checksum=checksum)

    def _look_ahead(self) -> None:
        """Take micro-batches until one more is there than a step needs, or there is no more."""
        try:
            if self._micro_batches is None:
                self._micro_batches = self._start(0)
            while len(self._ahead) <= self._shape.num_micro_batches and not self._ended:
                if len(self._ahead) == self._shape.num_micro_batches:
                    self.boundary = capture_state()
                self._ahead.append(next(self._micro_batches))
        except StopIteration:
            self._ended = True
        except Exception as error:  # whatever a user's dataset or collate_fn raises
            self._error = error
            self._ended = True

    def _join(self, raw: list[Any]) -> JoinedBatch:
        checked: list[Mapping[str, object]] = [
            check_micro_batch(item, self._limits) for item in raw
        ]
        for micro_batch in checked:
            check_rows(micro_batch, self._shape)
        batch = join_micro_batches(checked, self._shape)
        check_length(batch.longest, self._shape, self._limits)
        if self._must_be_sent:
            pack_value(batch.values)
        return batch


class EpochStarter:
    """Starts epochs: the same order on every fetching rank, the same random state on every rank."""

    def __init__(
        self,
        dataloader: DataLoader[Any],
        replica: ReplicaPlace,
        *,
        shape: BatchShape,
        limits: BatchLimits,
        device: torch.device,
    ) -> None:
        self._dataloader = dataloader
        self._replica = replica
        self._shape = shape
        self._limits = limits
        self._device = device
        self._part = OwnPart(dataloader, dp_rank=replica.dp_rank, dp_size=replica.dp_size)
        self._has_workers = False
        self.num_started = 0

    def start(self) -> FetchingEpoch | None:
        """Start an epoch; return what fetches it, or None on a rank that does not fetch.

        Every rank must call it. Communicates over the group of the fetching ranks. Afterwards
        torch's default generator has moved on every rank as far as a plain DataLoader moves it.
        """
        draws = self._num_seed_draws() + num_order_draws(self._dataloader)
        epoch = self._start_fetching(draws) if self._replica.is_fetching else None
        for _ in range(draws):
            draw_seed()
        self._has_workers = True
        self.num_started += 1
        return epoch

    def _num_seed_draws(self) -> int:
        """Return how many numbers the DataLoader itself draws: the seed of its workers.

        Persistent workers keep theirs, and a DataLoader with a generator draws it there.
        """
        return int(self._dataloader.generator is None and not self._keeps_workers())

    def _keeps_workers(self) -> bool:
        """Return whether workers of an earlier epoch go on, maybe one in another process."""
        loader = self._dataloader
        return loader.persistent_workers and loader.num_workers > 0 and self.num_started > 0

    def _start_fetching(self, draws: int) -> FetchingEpoch:
        replica = self._replica
        state = self._common_state()
        if draws == 0 and self.num_started > 0:
            # Nothing moves the default generator: without this, a collate_fn would find the same
            # random numbers in every epoch.
            state = state | torch_state(draw_from(state) + self.num_started)
        witness = OrderWitness(replica.dp_size * self._shape.num_micro_batches)
        enter_order: EnterStream = nullcontext
        if replica.is_first_fetching:
            stream = RandomStream({"torch": state["torch"]})
        elif splits_by_index(self._dataloader):
            order, stream = self._separate_streams(state)
            enter_order = order.entered
        else:
            stream = RandomStream(state)
        if self._keeps_workers() and not self._has_workers:
            if replica.is_first_fetching:
                enter_order = RandomStream({"torch": state["torch"]}).entered
            enter_order = _before_seed(enter_order, generators_of(self._dataloader))
        return FetchingEpoch(
            lambda num_skipped: self._part.batches(witness, enter_order, num_skipped),
            stream=stream,
            witness=witness,
            shape=self._shape,
            limits=self._limits,
            must_be_sent=replica.has_peers,
            can_seek=can_seek(self._dataloader),
        )

    def _common_state(self) -> RandomState:
        """Return the first fetching rank's random state, and give its generators to the others."""
        replica = self._replica
        state = capture_state()
        generators = generators_of(self._dataloader)
        if replica.dp_size == 1:
            return state
        assert replica.dp_group is not None
        mine = (state, [generator.get_state() for generator in generators])
        common, generator_states = broadcast_value(
            pack_value(mine) if replica.is_first_fetching else None,
            source=dist.get_global_rank(replica.dp_group, 0),
            group=replica.dp_group,
            device=self._device,
        )
        for generator, generator_state in zip(generators, generator_states, strict=True):
            generator.set_state(generator_state.cpu())
        common_state: RandomState = to_device(common, torch.device("cpu"))
        return common_state

    def _separate_streams(self, state: RandomState) -> tuple[RandomStream, RandomStream]:
        """Return the stream of the common order and that of this replica's own samples.

        The order is what the first replica draws after its seed; the samples have numbers of their
        own, lest all replicas mask or augment alike.
        """
        order = RandomStream(state)
        seed = draw_from(state) + self._replica.dp_rank
        with order.entered():
            for _ in range(self._num_seed_draws()):
                draw_seed()
        return order, RandomStream(torch_state(seed))


def _before_seed(enter_order: EnterStream, generators: list[torch.Generator]) -> EnterStream:
    """Return `enter_order` as it was before new workers drew a seed: those they replace had one."""
    states = [generator.get_state() for generator in generators]

    @contextmanager
    def entered() -> Iterator[None]:
        while states:
            generators[len(states) - 1].set_state(states.pop())
        with enter_order():
            yield

    return entered
