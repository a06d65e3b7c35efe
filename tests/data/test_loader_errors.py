"""Data that fails: all ranks stop, none waits, and each says why."""

from __future__ import annotations

import logging
import random
from functools import partial

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterDataPipe, Sampler
from torch.utils.data.distributed import DistributedSampler

from accelerate_megatron.data.order import check_dataloader, micro_batch_size_of
from accelerate_megatron.errors import BatchError, ConfigurationError, UnsupportedError
from tests.data.loading import Failing, Numbered, Streamed, collate, iterate, wrap
from tests.helpers.ranks import run_ranks

SHAPE = {"num_micro_batches": 2, "micro_batch_size": 2}


def _failing(bad, **settings):
    return DataLoader(Failing(16, bad), batch_size=2, collate_fn=collate, **settings)


def _numbered(length, **settings):
    return DataLoader(Numbered(length), **({"batch_size": 2, "collate_fn": collate} | settings))


@pytest.mark.parametrize("bad", [2, 14], ids=["first-step", "later-step"])
@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}], ids=["main-process", "worker"])
def test_a_dataset_that_fails_on_one_rank_stops_all(settings, bad):
    # Batch 1 (samples 2 and 3) and batch 7 (14 and 15) belong to the second replica: ranks 2, 3.
    errors = run_ranks(
        iterate, partial(_failing, bad, **settings), 2, SHAPE, num_ranks=4, errors="return"
    )

    assert isinstance(errors[2], OSError)
    assert f"sample {bad} cannot be read" in str(errors[2])
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], BatchError)
        assert "rank 2 could not fetch a batch" in str(errors[rank]).lower()
        assert f"sample {bad} cannot be read" in str(errors[rank])


def _steps_before_the_error():
    steps = 0
    try:
        for _ in wrap(_failing(14), 1):
            steps += 1
    except OSError:
        pass
    return steps


def test_steps_before_a_failing_sample_are_still_given():
    # Batch 7 fails; looking one batch ahead finds it only in the step that needs it.
    assert run_ranks(_steps_before_the_error, num_ranks=1) == [3]


def test_ids_beyond_the_vocabulary_are_refused_alike_on_all_ranks():
    # Samples 99 and 100 are ids of their own; batch 49 (98, 99) belongs to the second replica.
    errors = run_ranks(iterate, partial(_numbered, 101), 2, SHAPE, num_ranks=4, errors="return")

    assert {type(error) for error in errors} == {BatchError}
    (text,) = {str(error) for error in errors}
    assert "Data-parallel rank 1: input_ids holds 99, but the vocabulary has 99 tokens" in text


def test_one_replica_is_not_numbered_in_the_message():
    (text,) = {
        str(error)
        for error in run_ranks(
            iterate, partial(_numbered, 101), 1, SHAPE, num_ranks=2, errors="return"
        )
    }

    assert text.startswith("input_ids holds 99")


def _collate_with_function(samples):
    return collate(samples) | {"function": [lambda: None for _ in samples]}


def test_what_cannot_be_sent_to_the_other_ranks_stops_all():
    make = partial(_numbered, 8, collate_fn=_collate_with_function)

    errors = run_ranks(iterate, make, 1, SHAPE, num_ranks=2, errors="return")

    assert isinstance(errors[1], BatchError)
    assert "pickle" in str(errors[1])


class _OwnOrder(Sampler):
    """A sampler that every rank seeds in its own way."""

    def __iter__(self):
        yield from random.Random(dist.get_rank()).sample(range(40), 40)

    def __len__(self):
        return 40


def _own_part():
    """Each rank is given a part of the data only, a different one."""
    return DataLoader(_Shifted(dist.get_rank()), batch_size=2, collate_fn=collate)


class _Shifted(Streamed):
    def __init__(self, first):
        super().__init__(20)
        self.first = first

    def __iter__(self):
        for index in range(self.first, self.first + 20):
            yield self.samples[index]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(_numbered, 40, sampler=_OwnOrder()), id="sampler"),
        pytest.param(_own_part, id="stream"),
    ],
)
def test_ranks_that_iterate_different_data_are_told_so(make):
    errors = run_ranks(iterate, make, 2, SHAPE, num_ranks=2, errors="return")

    for error in errors:
        assert isinstance(error, BatchError)
        assert "see different data, or the same in another order: rank 0 and rank 1" in str(error)


def _ends_early():
    """The second replica's dataset is shorter than the first one's."""
    return _numbered(17 if dist.get_rank() == 0 else 8)


def test_a_dataset_that_ends_early_on_one_rank_goes_on_there_without_weight():
    (first, _), (second, warnings) = run_ranks(_iterate_with_log, _ends_early, num_ranks=2)

    assert [step["num_real_rows"] for step in first[0]] == [4, 4, 1]
    assert [step["num_real_rows"] for step in second[0]] == [4, 0, 0]
    assert len(warnings) == 1
    assert "The data ended on data-parallel rank 1 while other ranks still have some" in warnings[0]


def _iterate_with_log(make):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("accelerate_megatron").addHandler(handler)
    return iterate(make, 2, SHAPE), told


class _Pipe(IterDataPipe):
    def __iter__(self):
        yield from range(3)


class _Sized:
    """A batch sampler of one's own that says how much it gives."""

    batch_size = 3

    def __iter__(self):
        yield [0, 1, 2]

    def __len__(self):
        return 1


class _Unsized(_Sized):
    batch_size = None


def test_a_batch_samplers_own_batch_size_is_the_micro_batch():
    assert micro_batch_size_of(DataLoader(Numbered(3), batch_sampler=_Sized())) == 3


@pytest.mark.parametrize(
    "dataloader",
    [
        DataLoader(Numbered(3), batch_size=None),
        DataLoader(Numbered(3), batch_sampler=_Unsized()),
    ],
    ids=["none", "batch-sampler"],
)
def test_a_dataloader_without_a_batch_size_is_refused(dataloader):
    with pytest.raises(
        ConfigurationError, match=r"batch_size None.*Give the DataLoader a batch_size"
    ):
        micro_batch_size_of(dataloader)


@pytest.mark.parametrize(
    ("dataloader", "error", "message"),
    [
        pytest.param([1, 2], ConfigurationError, r"A list was given as DataLoader", id="list"),
        pytest.param(
            DataLoader(Numbered(4), sampler=DistributedSampler(Numbered(4), 2, 0)),
            ConfigurationError,
            r"DistributedSampler with num_replicas=2.*split twice",
            id="distributed",
        ),
        pytest.param(
            DataLoader(_Pipe()), UnsupportedError, r"dataset is an IterDataPipe", id="pipe"
        ),
    ],
)
def test_a_dataloader_that_cannot_be_split_is_refused(dataloader, error, message):
    with pytest.raises(error, match=message):
        check_dataloader(dataloader)


def _wrap_larger():
    wrap(_numbered(8, batch_size=4), 1)


def test_a_batch_size_above_the_micro_batch_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"batch size is 4, but the micro-batch has 2 rows"
    ):
        run_ranks(_wrap_larger, num_ranks=1)
