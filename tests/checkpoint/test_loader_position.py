"""Where a loader is in its data, found again: random collators, workers, streams, generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accelerate_megatron.checkpoint.values import to_json
from accelerate_megatron.data.randomness import capture_state, restore_state
from tests.data.loading import wrap
from tests.helpers.ranks import run_ranks

SHAPE = {"num_micro_batches": 2, "micro_batch_size": 2}


class _Noisy:
    """Samples that draw from every generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        torch.rand(())
        return index * 1000 + random.randrange(10) * 100 + int(np.random.randint(10))


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        # Nothing random: what is drawn on one replica only would make the streams differ.
        return iter(range(40))


def collate(samples: list[int]) -> dict[str, torch.Tensor]:
    rows = torch.tensor(samples)[:, None] % 97
    rows = torch.cat([rows, torch.randint(0, 90, (len(samples), 1))], dim=1)
    return {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}


def plain_collate(samples: list[int]) -> dict[str, torch.Tensor]:
    rows = torch.tensor(samples)[:, None]
    return {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}


def shuffled(**settings: Any) -> DataLoader[Any]:
    return DataLoader(_Noisy(), 2, shuffle=True, collate_fn=collate, **settings)  # type: ignore[arg-type]


def with_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(_Noisy(), generator=generator)
    return DataLoader(_Noisy(), 2, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def stream() -> DataLoader[Any]:
    return DataLoader(_Stream(), 2, collate_fn=plain_collate)


def _stop_and_go(make: Callable[[], DataLoader[Any]], dp_size: int, used: int) -> bool:
    """Return whether a loader that goes on from a saved position gives what the first one did."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = wrap(make(), dp_size, **SHAPE)
    state: dict[str, Any] = {}
    seen: list[torch.Tensor] = []
    for _epoch in range(3):
        for batch in first:
            seen.append(batch["input_ids"].clone())
            random.random()
            np.random.random()
            if len(seen) == used:
                state = {"loader": first.state_dict(), "random": capture_state()}

    random.seed(99)
    torch.manual_seed(99)
    second = wrap(make(), dp_size, **SHAPE)
    second.load_state_dict(state["loader"])
    restore_state(state["random"])
    rest = []
    while len(rest) < len(seen) - used:
        for batch in second:
            rest.append(batch["input_ids"].clone())
            random.random()
            np.random.random()
    return all(torch.equal(a, b) for a, b in zip(seen[used:], rest, strict=True))


@pytest.mark.parametrize("used", [pytest.param(1, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize(
    "make",
    [shuffled, partial(shuffled, num_workers=2), with_generator, stream],
    ids=["shuffled", "workers", "generator", "stream"],
)
def test_the_next_batch_is_the_one_that_would_have_come(
    make: Callable[[], DataLoader[Any]], dp_size: int, used: int
) -> None:
    assert run_ranks(_stop_and_go, make, dp_size, used, num_ranks=dp_size) == [True] * dp_size


def _persistent(*, has_generator: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3) if has_generator else None
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    numbers: Any = list(range(40))
    return DataLoader(
        numbers, 2, shuffle=True, collate_fn=plain_collate, generator=generator, **workers
    )


@pytest.mark.parametrize(
    ("has_generator", "dp_size", "used"),
    [
        (False, 1, 12),
        pytest.param(True, 1, 12, marks=pytest.mark.slow),
        pytest.param(False, 2, 7, marks=pytest.mark.slow),
        (True, 2, 7),
    ],
)
def test_new_workers_do_not_change_the_order_of_an_epoch_that_kept_its_own(
    has_generator: bool, dp_size: int, used: int
) -> None:
    make = partial(_persistent, has_generator=has_generator)

    assert run_ranks(_stop_and_go, make, dp_size, used, num_ranks=dp_size) == [True] * dp_size


def _skipped(num_batches: int) -> list[list[int]]:
    ordered = DataLoader(list(range(40)), 2, collate_fn=collate)  # type: ignore[arg-type]
    loader = wrap(ordered, 1, **SHAPE)
    loader.skip_to(num_batches)
    return [[row[0] for row in batch["input_ids"].tolist()] for batch in loader]


def test_skip_to_begins_with_that_batch_once() -> None:
    [batches] = run_ranks(_skipped, 3, num_ranks=1)

    assert len(batches) == 7
    assert batches[0] == [12, 13, 14, 15]


def _positions(used: int) -> tuple[Any, Any]:
    """Return a position, and that of a loader which has taken it over and given nothing yet."""
    first, second = wrap(shuffled(), 1, **SHAPE), wrap(shuffled(), 1, **SHAPE)
    batches = iter(first)
    for _ in range(used):
        next(batches)
    state = first.state_dict()
    second.load_state_dict(state)
    return to_json(state), to_json(second.state_dict())


def test_a_position_that_was_loaded_is_kept_until_the_loader_is_used() -> None:
    [(saved, again)] = run_ranks(_positions, 3, num_ranks=1)

    assert saved["samples"] == 12
    assert again == saved
