"""Another batch size over the same samples."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from accelerate_megatron.data.rebatch import with_micro_batch_size
from accelerate_megatron.errors import ConfigurationError
from tests.data.loading import Numbered, Streamed, collate, sample_numbers


def _samples(dataloader):
    torch.manual_seed(0)
    return [sample_numbers(batch) for batch in dataloader]


@pytest.mark.parametrize(
    "dataloader",
    [
        pytest.param(
            DataLoader(Numbered(7), batch_size=4, shuffle=True, collate_fn=collate), id="shuffled"
        ),
        pytest.param(DataLoader(Streamed(7), batch_size=4, collate_fn=collate), id="stream"),
    ],
)
def test_samples_keep_their_order_in_batches_of_the_new_size(dataloader):
    given = _samples(dataloader)

    changed = _samples(with_micro_batch_size(dataloader, 2))

    assert list(chain(*changed)) == list(chain(*given))
    assert [len(batch) for batch in changed] == [2, 2, 2, 1]


def test_a_loader_of_the_right_size_is_left_alone():
    dataloader = DataLoader(Numbered(7), batch_size=2)

    assert with_micro_batch_size(dataloader, 2) is dataloader


class _OwnBatches:
    batch_size = 4
    sampler = SequentialSampler(range(7))

    def __iter__(self):
        yield [0, 1, 2, 3]


def test_batches_of_a_sampler_of_ones_own_are_not_recut():
    dataloader = DataLoader(Numbered(7), batch_sampler=_OwnBatches())

    with pytest.raises(ConfigurationError, match=r"_OwnBatches gives batches of 4, .*run is 2"):
        with_micro_batch_size(dataloader, 2)


class _OwnWay(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__() if len(batch))


@pytest.mark.parametrize("dataset", [Numbered(7), Streamed(7)], ids=["indices", "stream"])
def test_a_loader_that_iterates_in_its_own_way_is_not_recut(dataset):
    dataloader = _OwnWay(dataset, batch_size=4, collate_fn=collate)

    with pytest.raises(ConfigurationError, match=r"own __iter__ gives batches of 4, .*run is 2"):
        with_micro_batch_size(dataloader, 2)
