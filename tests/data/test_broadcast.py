"""Nested values arrive whole, in two collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accelerate_megatron.data.broadcast import broadcast_value, pack_value
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")

VALUE = {
    "input_ids": torch.arange(6).reshape(2, 3),
    "nested": [{"mask": torch.tensor([True, False, True])}, (torch.tensor(0.5), "text", None)],
    "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "strided": torch.arange(8.0)[::2],
    "empty": torch.empty((0, 3)),
    "names": ["a", "b"],
}


def _receive(source):
    packed = pack_value(VALUE) if dist.get_rank() == source else None
    return broadcast_value(packed, source=source, group=None, device=CPU)


def _receive_in_pairs():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    packed = pack_value(torch.tensor([rank])) if rank % 2 else None
    return broadcast_value(packed, source=rank | 1, group=pairs[rank // 2], device=CPU).item()


def _write_to_what_arrived():
    received = _receive(0)
    before = received["half"]._version
    received["input_ids"].zero_()
    return received["half"]._version == before


def test_every_rank_gets_the_sources_value():
    for received in run_ranks(_receive, 1, num_ranks=3):
        assert received["nested"][1][1:] == ("text", None)
        assert received["names"] == ["a", "b"]
        for key in ("input_ids", "half", "strided", "empty"):
            assert received[key].dtype == VALUE[key].dtype
            assert torch.equal(received[key], VALUE[key])
        assert received["nested"][0]["mask"].tolist() == [True, False, True]
        assert received["nested"][1][0].item() == 0.5


def test_groups_do_not_mix():
    assert run_ranks(_receive_in_pairs, num_ranks=4) == [1, 1, 3, 3]


def test_received_tensors_do_not_share_a_version():
    assert run_ranks(_write_to_what_arrived, num_ranks=2) == [True, True]


def test_what_cannot_be_sent_fails_before_any_collective():
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        pack_value({"function": lambda: None})
