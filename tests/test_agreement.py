"""Ranks that meet in the store: all return, or all raise the same error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from accelerate_megatron.agreement import agree
from accelerate_megatron.errors import ConfigurationError, RanksDisagreeError
from tests.helpers.ranks import run_ranks


def _agree(settings, error=None, *, name="settings", timeout=20.0):
    agree(
        settings,
        error,
        store=dist.distributed_c10d._get_default_store(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        name=name,
        timeout=timeout,
    )


def _agree_on(settings_of_rank, error_of_rank):
    rank = dist.get_rank()
    _agree(settings_of_rank.get(rank, settings_of_rank.get("all")), error_of_rank.get(rank))


def _agree_again_and_again():
    for step in range(3):
        _agree({"step": step})
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    keys = [f"agreement/settings/1/{what}" for what in (0, 1, "outcome", "readers")]
    return [key for key in keys if store.check([key])]


def _agree_without(missing, timeout):
    dist.barrier()  # the others come at one time
    if dist.get_rank() != missing:
        try:
            _agree({}, timeout=timeout)
        except TimeoutError as error:
            return str(error)
    return None


def _agree_on_things_without_a_value():
    _agree({"path": Path("a"), "function": _agree, "object": object(), "set": {"b", "a"}})


def _texts(settings, errors, num_ranks=3):
    return run_ranks(_agree_on, settings, errors, num_ranks=num_ranks, errors="return")


def test_equal_settings_pass_repeatedly_and_leave_no_keys():
    assert run_ranks(_agree_again_and_again, num_ranks=2) == [[], []]


def test_an_error_of_one_rank_is_raised_on_all_with_that_ranks_number():
    caught = _texts({"all": {"tp_degree": 3}}, {1: ConfigurationError("tp_degree is 3.")})

    assert [type(error) for error in caught] == [ConfigurationError] * 3
    assert {str(error) for error in caught} == {"rank 1: tp_degree is 3."}


def test_an_error_that_all_ranks_have_is_raised_as_it_is():
    error = ConfigurationError("tp_degree is 3.")

    caught = _texts({"all": {}}, {0: error, 1: error}, num_ranks=2)

    assert [str(error) for error in caught] == ["tp_degree is 3."] * 2


def test_different_errors_are_all_told():
    caught = _texts({"all": {}}, {0: ValueError("one"), 2: KeyError("two")})

    assert {str(error) for error in caught} == {"rank 0: one\nrank 2: KeyError: 'two'"}
    assert {type(error) for error in caught} == {ValueError}


def test_an_error_of_a_foreign_type_names_the_type():
    caught = _texts({"all": {}}, {0: KeyError("two")}, num_ranks=2)

    assert {str(error) for error in caught} == {"rank 0: KeyError: 'two'"}


def test_different_settings_name_field_values_and_ranks():
    settings = {"all": {"tp_degree": 2, "lr": 0.1}, 2: {"tp_degree": 4, "lr": 0.1}}

    caught = _texts(settings, {})

    assert {type(error) for error in caught} == {RanksDisagreeError}
    (text,) = {str(error) for error in caught}
    assert "tp_degree is 2 on ranks 0, 1 and 4 on rank 2" in text
    assert "lr" not in text


def test_an_error_that_comes_from_different_settings_says_so():
    settings = {"all": {"tp_degree": 2}, 1: {"tp_degree": 3}}

    (text,) = {str(error) for error in _texts(settings, {1: ValueError("3 does not divide 4.")})}

    assert text.startswith("rank 1: 3 does not divide 4.\n")
    assert "tp_degree is 2 on ranks 0, 2 and 3 on rank 1" in text


def test_a_setting_that_only_some_ranks_have_is_named():
    (text,) = {str(e) for e in _texts({"all": {"a": 1}, 1: {}}, {}, num_ranks=2)}

    assert "a is 1 on rank 0 and not set on rank 1" in text


def test_objects_are_compared_without_their_addresses():
    run_ranks(_agree_on_things_without_a_value, num_ranks=2)


class _LateReader:
    """A store from which this rank reads some time after the others."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key):
        time.sleep(0.5)
        return self._store.get(key)


def _disagree_in_a_store_of_rank_0(folder):
    rank, port = int(os.environ["RANK"]), folder / "port"
    store = dist.TCPStore(
        "127.0.0.1",
        0 if rank == 0 else _read_when_there(port),
        world_size=2,
        is_master=rank == 0,
        wait_for_workers=False,
    )
    if rank == 0:
        (folder / "unfinished").write_text(str(store.port))
        (folder / "unfinished").rename(port)
    try:
        agree(
            {"lr": rank},
            None,
            store=store if rank == 0 else _LateReader(store),
            rank=rank,
            world_size=2,
            name="settings",
        )
    except RanksDisagreeError as error:
        text = str(error)
    del store  # rank 0's is gone with it, as when its process ends
    return text


def _read_when_there(port):
    while not port.exists():
        time.sleep(0.01)
    return int(port.read_text())


def test_an_error_reaches_ranks_that_are_late_to_read_it_before_rank_0_ends_the_store(tmp_path):
    texts = run_ranks(_disagree_in_a_store_of_rank_0, tmp_path, num_ranks=2, process_group=False)

    assert texts[0] == texts[1]
    assert "lr is 0 on rank 0 and 1 on rank 1" in texts[0]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_does_not_come_is_named_in_bounded_time(missing):
    # Not by the ranks' own limit, torch's half an hour.
    outcomes = run_ranks(_agree_without, missing, 3.0, num_ranks=3)

    told = [outcome for outcome in outcomes if outcome is not None]
    assert len(told) == 2
    assert all(f"rank {missing} of 3 did not come within 3 s" in text for text in told)
