"""Datasets, groups and one rank's epoch for the tests of the loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate_megatron.data.checks import BatchLimits
from accelerate_megatron.data.collate import BatchShape
from accelerate_megatron.data.loader import MegatronDataLoader
from accelerate_megatron.data.replica import ReplicaPlace

VOCAB_SIZE = 99
CPU = torch.device("cpu")


class Numbered(Dataset):
    """Sample i is i, repeated 3 to 6 times: a row shows which sample it is."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch: int | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3 + index % 4,), index)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Failing(Numbered):
    """Cannot read the sample `bad`."""

    def __init__(self, length: int, bad: int) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        return super().__getitem__(index)


class Streamed(IterableDataset):
    """The samples of `Numbered` without indices, in order or shuffled by the named library."""

    def __init__(self, length: int, shuffle: str | None = None) -> None:
        self.samples = Numbered(length)
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(len(self.samples)))
        if self.shuffle == "torch":
            order = torch.randperm(len(order)).tolist()
        elif self.shuffle == "python":
            random.shuffle(order)
        elif self.shuffle == "numpy":
            np.random.shuffle(order)
        for index in order:
            yield self.samples[index]


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


def collate_at_random(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mask labels at random, as masked language modelling does."""
    batch = collate(samples)
    hidden = torch.rand(batch["labels"].shape) < 0.5
    return batch | {"labels": batch["labels"].masked_fill(hidden, -100)}


def this_replica(dp_size: int) -> ReplicaPlace:
    """Cut the world into `dp_size` replicas of neighbouring ranks."""
    rank, model_size = dist.get_rank(), dist.get_world_size() // dp_size
    dp_rank, place = divmod(rank, model_size)
    replica_groups = [
        dist.new_group(list(range(start, start + model_size)))
        for start in range(0, dist.get_world_size(), model_size)
    ]
    dp_groups = [
        dist.new_group(list(range(start, dist.get_world_size(), model_size)))
        for start in range(model_size)
    ]
    return ReplicaPlace(
        dp_rank=dp_rank,
        dp_size=dp_size,
        dp_group=dp_groups[place],
        replica_group=replica_groups[dp_rank],
        fetch_rank=dp_rank * model_size,
        is_fetching=place == 0,
    )


def wrap(dataloader: DataLoader, dp_size: int, **shape: Any) -> MegatronDataLoader:
    fields = {"num_micro_batches": 2, "micro_batch_size": 2} | shape
    return MegatronDataLoader(
        dataloader,
        groups=this_replica(dp_size),
        shape=BatchShape(**fields),
        limits=BatchLimits(vocab_size=VOCAB_SIZE, max_positions=64),
        device=CPU,
    )


def sample_numbers(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return the samples of a batch, in the order of its rows; without filler rows."""
    ids, labels = batch["input_ids"], batch["labels"]
    return [int(row[0]) for row, label in zip(ids, labels, strict=True) if (label != -100).any()]


def iterate(
    make: Callable[[], DataLoader], dp_size: int, shape: dict[str, Any], num_epochs: int = 1
) -> list[list[dict[str, Any]]]:
    """Iterate; return for each epoch and step what the rank saw."""
    loader = wrap(make(), dp_size, **shape)
    epochs = []
    for _ in range(num_epochs):
        steps = [
            {
                "samples": sample_numbers(batch),
                "batch": batch,
                "num_real_rows": loader.num_real_rows,
                "is_last": loader.end_of_dataloader,
            }
            for batch in loader
        ]
        epochs.append(steps)
    return epochs
