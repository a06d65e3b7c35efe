"""The loader on real ranks: who gets which samples, in which order, and how an epoch ends."""

from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, SubsetRandomSampler

from accelerate_megatron.data.checks import was_checked
from tests.data.loading import (
    Numbered,
    Streamed,
    collate,
    collate_at_random,
    iterate,
    sample_numbers,
    wrap,
)
from tests.helpers.ranks import run_ranks

SHAPE = {"num_micro_batches": 2, "micro_batch_size": 2}


def _numbered(length, **settings):
    return DataLoader(Numbered(length), **({"batch_size": 2, "collate_fn": collate} | settings))


def _streamed(length, shuffle=None, **settings):
    dataset = Streamed(length, shuffle)
    return DataLoader(dataset, **({"batch_size": 2, "collate_fn": collate} | settings))


def _with_generator(length, **settings):
    return _numbered(
        length,
        shuffle=True,
        generator=torch.Generator().manual_seed(5 + dist.get_rank()),
        **settings,
    )


def _subset(length):
    return _numbered(length, sampler=SubsetRandomSampler(range(length)))


def _plain_order(make, num_epochs):
    """Return, epoch by epoch, the samples that a plain DataLoader gives in one process."""
    torch.manual_seed(0)
    loader = make()
    return [[n for batch in loader for n in sample_numbers(batch)] for _ in range(num_epochs)]


def _order_of_ranks(ranks, epoch, *, dp_size):
    """Put the ranks' batches back together: micro-batch i of a step came from rank i mod dp."""
    order = []
    for step in range(len(ranks[0][epoch])):
        own = [rank[epoch][step]["samples"] for rank in ranks]
        pairs = [[numbers[0:2], numbers[2:4]] for numbers in own]
        for micro_batch in range(2):
            for dp_rank in range(dp_size):
                order.extend(pairs[dp_rank][micro_batch])
    return order


LENGTHS = (1, 2, 7, 8, 9, 16, 17)


def _iterate_lengths(make, dp_size):
    return [iterate(partial(make, length), dp_size, SHAPE)[0] for length in LENGTHS]


@pytest.mark.parametrize("make", [_numbered, _streamed], ids=["indices", "stream"])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_sample_is_used_once_and_all_replicas_take_equally_many_steps(dp_size, make):
    ranks = run_ranks(_iterate_lengths, make, dp_size, num_ranks=dp_size)

    for length, *steps_of_ranks in zip(LENGTHS, *ranks, strict=True):
        used = [n for steps in steps_of_ranks for step in steps for n in step["samples"]]
        assert sorted(used) == list(range(length))
        num_steps = math.ceil(length / (4 * dp_size))
        for steps in steps_of_ranks:
            assert [step["is_last"] for step in steps] == [False] * (num_steps - 1) + [True]
            assert [step["num_real_rows"] for step in steps] == [len(s["samples"]) for s in steps]
            assert all(len(step["batch"]["input_ids"]) == 4 for step in steps)


def _iterate_nothing():
    return iterate(partial(_streamed, 0), 2, SHAPE)


def test_no_data_is_no_step():
    assert run_ranks(_iterate_nothing, num_ranks=2) == [[[]], [[]]]


def _length_and_steps(length, drop_last):
    loader = wrap(_numbered(length, drop_last=drop_last), 2)
    return len(loader), sum(1 for _ in loader), loader.batch_size, loader.total_batch_size


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 2), (True, 1)])
def test_length_is_the_number_of_steps(drop_last, steps):
    # 9 samples are 5 batches of two, the last one short; a step takes 4 batches.
    told = run_ranks(_length_and_steps, 9, drop_last, num_ranks=2)

    assert told == [(steps, steps, 4, 8)] * 2


def test_ranks_of_a_replica_get_the_same_batch_from_a_random_collator():
    make = partial(_numbered, 12, shuffle=True, collate_fn=collate_at_random)

    ranks = run_ranks(iterate, make, 2, SHAPE, num_ranks=4)

    for first, second in ((0, 1), (2, 3)):
        for ours, theirs in zip(ranks[first][0], ranks[second][0], strict=True):
            for key, value in ours["batch"].items():
                assert torch.equal(value, theirs["batch"][key])
    assert not torch.equal(ranks[0][0][0]["batch"]["labels"], ranks[2][0][0]["batch"]["labels"])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(_numbered, 21), id="sequential"),
        pytest.param(partial(_numbered, 21, shuffle=True), id="shuffled"),
        pytest.param(partial(_numbered, 21, shuffle=True, num_workers=1), id="workers"),
        pytest.param(
            partial(_numbered, 21, shuffle=True, num_workers=1, persistent_workers=True),
            id="persistent-workers",
        ),
        pytest.param(partial(_streamed, 21, "torch"), id="shuffled-stream"),
    ],
)
def test_order_over_epochs_is_that_of_a_plain_dataloader_with_the_same_seed(make):
    ranks = run_ranks(iterate, make, 2, SHAPE, 3, num_ranks=2)

    # In a process of its own: to start workers it forks, which pytest's threads are no good for.
    (plain,) = run_ranks(_plain_order, make, 3, num_ranks=1)
    # A stream that shuffles draws more than the loader can know of: only its first epoch is equal.
    for epoch in range(1 if make.func is _streamed else 3):
        assert _order_of_ranks(ranks, epoch, dp_size=2) == plain[epoch]


def test_order_is_that_of_the_first_ranks_generator():
    ranks = run_ranks(iterate, partial(_with_generator, 21), 2, SHAPE, 2, num_ranks=2)

    generator = torch.Generator().manual_seed(5)
    plain = _plain_order(partial(_numbered, 21, shuffle=True, generator=generator), 2)
    assert [_order_of_ranks(ranks, epoch, dp_size=2) for epoch in range(2)] == plain


def test_a_sampler_that_draws_in_another_way_is_the_same_on_all_ranks():
    ranks = run_ranks(iterate, partial(_subset, 21), 2, SHAPE, num_ranks=2)

    assert _order_of_ranks(ranks, 0, dp_size=2) == _plain_order(partial(_subset, 21), 1)[0]


def _iterate_with_other_seeds(shuffle):
    import random

    import numpy as np

    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    return iterate(partial(_streamed, 21, shuffle), 2, SHAPE)


@pytest.mark.parametrize("library", ["torch", "python", "numpy"])
def test_a_stream_shuffled_by_any_library_is_split_without_loss(library):
    ranks = run_ranks(_iterate_with_other_seeds, library, num_ranks=2)

    order = _order_of_ranks(ranks, 0, dp_size=2)
    assert sorted(order) == list(range(21))
    assert order != list(range(21))


def _labels_of_epochs(num_epochs):
    generator = torch.Generator().manual_seed(3)
    make = partial(_numbered, 4, generator=generator, collate_fn=collate_at_random)
    return [epoch[0]["batch"]["labels"] for epoch in iterate(make, 1, SHAPE, num_epochs)]


def test_a_random_collator_differs_between_epochs_also_when_the_loader_has_a_generator():
    (labels,) = run_ranks(_labels_of_epochs, 2, num_ranks=1)

    assert not torch.equal(labels[0], labels[1])


def _random_state_after(dp_size):
    iterate(partial(_numbered, 9, shuffle=True, collate_fn=collate_at_random), dp_size, SHAPE)
    return torch.get_rng_state()


@pytest.mark.parametrize("dp_size", [1, 2])
def test_torchs_random_state_moves_alike_on_all_ranks_and_as_in_a_plain_loop(dp_size):
    states = run_ranks(_random_state_after, dp_size, num_ranks=4)

    torch.manual_seed(0)
    for _ in DataLoader(Numbered(9), batch_size=2, shuffle=True, collate_fn=collate):
        pass
    for state in states:
        assert torch.equal(state, torch.get_rng_state())


class _Untouched(Numbered):
    def __getitem__(self, index):
        raise AssertionError("a sample was fetched")


def _wrap_only():
    before = torch.get_rng_state()
    loader = wrap(DataLoader(_Untouched(9), batch_size=2, shuffle=True), 2)
    return len(loader), torch.equal(before, torch.get_rng_state())


def test_wrapping_fetches_nothing_and_draws_nothing():
    assert run_ranks(_wrap_only, num_ranks=2) == [(2, True)] * 2


def _stop_early_and_start_again():
    loader = wrap(_numbered(16), 2)
    for _ in loader:
        break
    return [sample_numbers(batch) for batch in loader]


def test_an_epoch_can_be_left_early():
    ranks = run_ranks(_stop_early_and_start_again, num_ranks=2)

    assert ranks[0] == [[0, 1, 4, 5], [8, 9, 12, 13]]


def _pass_epoch_on():
    loader = wrap(_numbered(4), 1)
    loader.set_epoch(7)
    return loader.dataset.epoch


def test_set_epoch_reaches_the_dataset():
    assert run_ranks(_pass_epoch_on, num_ranks=1) == [7]


def _is_recognised():
    batch = next(iter(wrap(_numbered(4), 1)))
    return was_checked(batch["input_ids"]), was_checked(batch["labels"])


def test_tensors_from_the_loader_are_known_to_be_checked():
    assert run_ranks(_is_recognised, num_ranks=2) == [(True, True)] * 2


def _log_of_cutting():
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("accelerate_megatron")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return [batch["input_ids"].shape[1] for batch in wrap(_numbered(16), 1, seq_length=4)], told


def test_cutting_is_reported_once_by_one_rank():
    quiet, speaking = run_ranks(_log_of_cutting, num_ranks=2)

    assert quiet == ([4, 4, 4, 4], [])
    assert speaking[0] == [4, 4, 4, 4]
    assert len(speaking[1]) == 1
    assert "Sequences longer than seq_length = 4 are cut to it" in speaking[1][0]
