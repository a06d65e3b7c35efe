"""DataLoaders as people write them: Hugging Face datasets, streams without an end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_megatron import Accelerator
from tests.data.loading import Numbered, Streamed, collate, sample_numbers, wrap
from tests.helpers.ranks import run_ranks
from tests.training.start import start

LENGTH = 21


class Endless(IterableDataset):
    """The samples 0, 1, 2, ... without end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in count():
            yield Numbered(1)[0] + number


def hugging_face(is_stream: bool) -> DataLoader[Any]:
    datasets = pytest.importorskip("datasets")
    rows = [{"ids": [n] * (3 + n % 4)} for n in range(LENGTH)]
    dataset = datasets.Dataset.from_list(rows)
    dataset = dataset.to_iterable_dataset(num_shards=3) if is_stream else dataset
    return DataLoader(
        dataset.with_format("torch"),
        batch_size=2,
        collate_fn=lambda samples: collate([sample["ids"] for sample in samples]),
    )


def samples_of_epoch(is_stream: bool) -> list[int]:
    loader = wrap(hugging_face(is_stream), dp_size=2)
    return [number for batch in loader for number in sample_numbers(batch)]


@pytest.mark.parametrize("is_stream", [False, True], ids=["map-style", "iterable"])
def test_a_hugging_face_dataset_is_used_once_over_the_replicas(is_stream: bool) -> None:
    ranks = run_ranks(partial(samples_of_epoch, is_stream), num_ranks=2)

    assert sorted(ranks[0] + ranks[1]) == list(range(LENGTH))


def first_steps(number: int) -> list[int]:
    loader = wrap(DataLoader(Endless(), batch_size=2, collate_fn=collate), dp_size=2)
    return [n for batch in islice(loader, number) for n in sample_numbers(batch)]


def test_a_stream_without_an_end_gives_each_replica_its_batches() -> None:
    ranks = run_ranks(partial(first_steps, 3), num_ranks=2)

    assert sorted(ranks[0] + ranks[1]) == list(range(24))
    assert ranks[0] == [n for n in range(24) if n // 2 % 2 == 0]


def stream_of_a_job() -> list[Any]:
    accelerator = start(batch_size=2, tp_degree=2).accelerator
    stream = DataLoader(Streamed(LENGTH, shuffle="torch"), batch_size=2, collate_fn=collate)
    loader = accelerator.prepare(stream)
    return [(batch["input_ids"].tolist(), sample_numbers(batch)) for batch in loader]


def test_a_stream_is_shared_out_to_replicas_and_not_to_their_ranks() -> None:
    first, its_twin, second, other_twin = run_ranks(stream_of_a_job, num_ranks=4)

    assert first == its_twin
    assert second == other_twin
    used = [number for _, samples in (*first, *second) for number in samples]
    assert sorted(used) == list(range(LENGTH))


def skipped() -> tuple[list[Any], list[Any]]:
    started = start(batch_size=2)
    accelerator: Accelerator = started.accelerator
    plain = DataLoader(Numbered(10), batch_size=2, collate_fn=collate)
    loader = accelerator.prepare_data_loader(plain)
    whole = [sample_numbers(batch) for batch in loader]
    rest = [sample_numbers(batch) for batch in accelerator.skip_first_batches(loader, 2)]
    assert len(loader) == 5
    return whole, rest


def test_prepare_data_loader_and_skip_first_batches() -> None:
    ((whole, rest),) = run_ranks(skipped, num_ranks=1)

    assert whole == [[2 * n, 2 * n + 1] for n in range(5)]
    assert rest == whole[2:]
