"""The tests' own ranks: results, errors, hangs and crashes all come back."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.helpers.ranks import RankDiedError, RankTimeoutError, run_ranks

STATE: list[int] = []


def _sum_of_ranks(start: torch.Tensor) -> torch.Tensor:
    total = start + torch.distributed.get_rank()
    torch.distributed.all_reduce(total)
    return total


def _fail_on_one(failing: int) -> None:
    if torch.distributed.get_rank() == failing:
        raise KeyError("the reason")
    torch.distributed.barrier()


def _sleep_on_one(sleeping: int) -> None:
    if int(os.environ["RANK"]) == sleeping:
        time.sleep(600)


def _die(dying: int) -> None:
    if torch.distributed.get_rank() == dying:
        os._exit(7)
    torch.distributed.barrier()


def _leave_state_behind() -> int:
    STATE.append(1)
    os.environ["LEFT_BEHIND"] = "1"
    return len(STATE)


def _read_environment() -> tuple[str, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return (*(os.environ[name] for name in names), os.environ.get("LEFT_BEHIND", "nothing"))


def _say_who_failed() -> None:
    raise ValueError(f"rank {torch.distributed.get_rank()}")


def test_results_come_back_in_rank_order():
    totals = run_ranks(_sum_of_ranks, torch.tensor([1.0]), num_ranks=3)

    assert totals == [torch.tensor([6.0])] * 3


def test_first_failing_ranks_error_is_raised_with_its_traceback():
    with pytest.raises(KeyError, match="the reason") as caught:
        run_ranks(_fail_on_one, 1, num_ranks=2)

    assert "rank 1 failed" in str(caught.value.__cause__)
    assert "_fail_on_one" in str(caught.value.__cause__)


def test_errors_of_all_ranks_can_be_asked_for():
    errors = run_ranks(_say_who_failed, num_ranks=2, errors="return")

    assert [str(error) for error in errors] == ["rank 0", "rank 1"]


def test_a_rank_that_hangs_is_ended_and_its_stack_shown():
    with pytest.raises(RankTimeoutError, match=r"rank 1 was still running after 4 s") as caught:
        # Without a group, whose ranks would have to meet within that time.
        run_ranks(_sleep_on_one, 1, num_ranks=2, timeout=4, process_group=False)

    assert "_sleep_on_one" in str(caught.value)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankDiedError, match="rank 1 died: exit status 7"):
        run_ranks(_die, 1, num_ranks=2)


def test_nothing_is_left_behind_for_the_next_call():
    first = run_ranks(_leave_state_behind, num_ranks=1)
    second = run_ranks(_leave_state_behind, num_ranks=1)

    assert first == second == [1]
    assert run_ranks(_read_environment, num_ranks=2)[1] == ("1", "2", "1", "2", "nothing")
