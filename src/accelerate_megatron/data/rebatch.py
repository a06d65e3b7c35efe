"""A DataLoader with another batch size: all loaders of a run give micro-batches of one size."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate_megatron.data.order import loader_options, micro_batch_size_of
from accelerate_megatron.errors import ConfigurationError


def with_micro_batch_size(dataloader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return `dataloader`, or one over the same samples in the same order in batches of `size`.

    Nothing is fetched and no random number drawn.

    Raises:
        ConfigurationError: Its batches come from a batch sampler, or an `__iter__`, of the user's
            own, of which only that knows how it would batch otherwise.
    """
    given = micro_batch_size_of(dataloader)
    if given == size:
        return dataloader
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    is_own = type(dataloader).__iter__ is not DataLoader.__iter__
    if is_own or not (is_stream or type(dataloader.batch_sampler) is BatchSampler):
        what = "own __iter__" if is_own else type(dataloader.batch_sampler).__name__
        raise ConfigurationError(
            f"The DataLoader's {what} gives batches of {given}, but the micro-batch of this run is "
            f"{size}: the smallest batch size of all prepared DataLoaders, or the largest with "
            "is_train_batch_min=False. Give all of them one size."
        )
    options = loader_options(dataloader)
    if is_stream:
        return DataLoader(
            dataloader.dataset, batch_size=size, drop_last=dataloader.drop_last, **options
        )
    sampler: Any = dataloader.batch_sampler
    batches = BatchSampler(sampler.sampler, size, sampler.drop_last)
    return DataLoader(dataloader.dataset, batch_sampler=batches, **options)
