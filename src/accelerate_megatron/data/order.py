"""Which batches of a DataLoader belong to which data-parallel rank.

Batch i of the common order goes to rank i mod n. Every rank runs through the whole order and keeps
its own part. For this the order must be the same everywhere: the ranks draw it from the same random
numbers, and an `OrderWitness` notices when it differs all the same.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from accelerate_megatron.errors import ConfigurationError, UnsupportedError

EnterStream = Callable[[], AbstractContextManager[None]]


def micro_batch_size_of(dataloader: DataLoader[Any]) -> int:
    """Return the number of samples that `dataloader` gives at once.

    Raises:
        ConfigurationError: It has no batch size, neither itself nor its batch sampler.
    """
    for holder in (dataloader, dataloader.batch_sampler):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    sampler = type(dataloader.batch_sampler).__name__ if dataloader.batch_sampler else "none"
    raise ConfigurationError(
        f"The DataLoader has batch_size None (its batch sampler: {sampler}); the micro-batch is "
        "its batch size. Give the DataLoader a batch_size, or its batch_sampler an attribute "
        "batch_size that holds the most samples it puts into one batch."
    )


def check_dataloader(dataloader: object) -> None:
    """Refuse what cannot be split over the data-parallel ranks.

    Raises:
        ConfigurationError: `dataloader` is no torch DataLoader, or it splits the data already.
        UnsupportedError: Its dataset is an IterDataPipe.
    """
    if not isinstance(dataloader, DataLoader):
        raise ConfigurationError(
            f"A {type(dataloader).__name__} was given as DataLoader; it has to be a "
            "torch.utils.data.DataLoader. Any iterable becomes one: wrap it in an IterableDataset."
        )
    if isinstance(dataloader.dataset, IterDataPipe):
        raise UnsupportedError(
            "The dataset is an IterDataPipe: iterating it makes every rank of the job "
            "communicate, but only some ranks fetch data. Use an IterableDataset."
        )
    for sampler in samplers_of(dataloader):
        if isinstance(sampler, DistributedSampler):
            raise ConfigurationError(
                f"The DataLoader has a {type(sampler).__name__} with num_replicas="
                f"{sampler.num_replicas}: prepare splits the data over the data-parallel ranks, "
                "and it would be split twice. Use shuffle=True or a plain sampler."
            )


def splits_by_index(dataloader: DataLoader[Any]) -> bool:
    """Return whether each rank can fetch its own batches only.

    It cannot when there are no indices (an iterable dataset), or when a subclass of DataLoader
    iterates in its own way. Each rank then fetches every batch and keeps its own.
    """
    has_indices = not isinstance(dataloader.dataset, IterableDataset)
    return has_indices and type(dataloader).__iter__ is DataLoader.__iter__


def can_seek(dataloader: DataLoader[Any]) -> bool:
    """Return whether samples can be left out without being fetched: none draws a random number."""
    return splits_by_index(dataloader) and getattr(dataloader.dataset, "draws_nothing", False)


def generators_of(dataloader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators the user gave to the DataLoader and its samplers, each once."""
    holders = [dataloader, *samplers_of(dataloader)]
    found = (getattr(holder, "generator", None) for holder in holders)
    unique = {id(item): item for item in found if isinstance(item, torch.Generator)}
    return list(unique.values())


def num_order_draws(dataloader: DataLoader[Any]) -> int:
    """Return how many numbers a sampler takes from torch's default generator for its order."""
    return int(
        any(
            isinstance(sampler, RandomSampler) and sampler.generator is None
            for sampler in samplers_of(dataloader)
        )
    )


def set_epoch(dataloader: DataLoader[Any], epoch: int) -> None:
    """Tell the epoch to the dataset and the samplers that want to know it."""
    for target in (*samplers_of(dataloader), dataloader.dataset):
        if hasattr(target, "set_epoch"):
            target.set_epoch(epoch)


def samplers_of(dataloader: DataLoader[Any]) -> list[Any]:
    """Return the sampler, the batch sampler and the sampler inside it, each once."""
    batch_sampler = dataloader.batch_sampler
    found = (dataloader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(item): item for item in found if item is not None}.values())


class OrderWitness:
    """A running checksum of the order of batches, remembered at the first batch of each step.

    The ranks compare it step by step, and so notice two orders before they train on them for long.
    """

    def __init__(self, batches_per_step: int) -> None:
        self._batches_per_step = batches_per_step
        self._checksum = 0
        self._position = 0
        self._at_step: dict[int, int] = {}

    def saw(self, content: bytes) -> None:
        """Take note of the next batch of the common order, this rank's or another's."""
        self._checksum = zlib.crc32(content, self._checksum)
        step, rest = divmod(self._position, self._batches_per_step)
        if rest == 0:
            self._at_step[step] = self._checksum
        self._position += 1

    def checksum_at(self, step: int) -> int:
        """Return the checksum up to the first batch of `step`; -1 if this rank saw none."""
        return self._at_step.pop(step, -1)


class _OwnBatches:
    """A batch sampler that gives every n-th batch of another one."""

    enter_order: EnterStream
    witness: OrderWitness
    num_skipped: int

    def __init__(self, batch_sampler: Any, *, rank: int, num_ranks: int) -> None:
        self.batch_sampler = batch_sampler
        self._rank = rank
        self._num_ranks = num_ranks

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        position = 0
        skipped, self.num_skipped = self.num_skipped, 0
        while True:
            with self.enter_order():
                try:
                    indices = next(batches)
                except StopIteration:
                    return
            self.witness.saw(_bytes_of_indices(indices))
            number, rank = divmod(position, self._num_ranks)
            if rank == self._rank and number >= skipped:
                yield indices
            position += 1

    def __len__(self) -> int:
        return len(range(self._rank, len(self.batch_sampler), self._num_ranks))


class OwnPart:
    """The batches of one data-parallel rank, epoch after epoch."""

    def __init__(self, dataloader: DataLoader[Any], *, dp_rank: int, dp_size: int) -> None:
        self._dataloader = dataloader
        self._rank = dp_rank
        self._num_ranks = dp_size
        self._own: DataLoader[Any] | None = None

    def batches(
        self, witness: OrderWitness, enter_order: EnterStream, num_skipped: int
    ) -> Iterator[Any]:
        """Return an iterator over this rank's batches of a new epoch.

        Args:
            witness: Is told of every batch of the common order.
            enter_order: Entered while the order is drawn; used only where ranks draw it apart from
                their items, that is when `splits_by_index`.
            num_skipped: How many of the first batches are left out without being fetched; 0
                unless `can_seek`.
        """
        takes_all = self._num_ranks == 1 and not num_skipped and enter_order is nullcontext
        if takes_all and self._own is None:
            return iter(self._dataloader)
        if splits_by_index(self._dataloader):
            return iter(self._own_loader(witness, enter_order, num_skipped))
        return self._every_nth(self._dataloader, witness)

    def _own_loader(
        self, witness: OrderWitness, enter_order: EnterStream, num_skipped: int
    ) -> DataLoader[Any]:
        """Return the loader of this rank's batches; kept, as its workers may be persistent."""
        if self._own is None:
            batch_sampler = _OwnBatches(
                self._dataloader.batch_sampler, rank=self._rank, num_ranks=self._num_ranks
            )
            self._own = _with_batch_sampler(self._dataloader, batch_sampler)
        own_batches: Any = self._own.batch_sampler
        own_batches.enter_order = enter_order
        own_batches.witness = witness
        own_batches.num_skipped = num_skipped
        return self._own

    def _every_nth(self, batches: Iterable[Any], witness: OrderWitness) -> Iterator[Any]:
        for position, batch in enumerate(batches):
            witness.saw(_bytes_of_batch(batch))
            if position % self._num_ranks == self._rank:
                yield batch


def _with_batch_sampler(dataloader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Return a DataLoader like `dataloader` that takes its batches of indices from elsewhere."""
    return DataLoader(dataloader.dataset, batch_sampler=batch_sampler, **loader_options(dataloader))


def loader_options(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of `dataloader` that do not say which samples it gives."""
    return {
        name: getattr(dataloader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
            "in_order",
        )
        if hasattr(dataloader, name)
    }


def _bytes_of_indices(indices: Any) -> bytes:
    return json.dumps(indices, default=_integer_or_type).encode()


def _integer_or_type(item: Any) -> int | str:
    try:
        return operator.index(item)
    except TypeError:
        # Its text may hold an address, which differs between ranks that agree.
        return type(item).__qualname__


def _bytes_of_batch(batch: Any) -> bytes:
    input_ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if not isinstance(input_ids, torch.Tensor):
        return b""
    return input_ids.detach().cpu().contiguous().numpy().tobytes()
