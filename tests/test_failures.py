from __future__ import annotations

import pytest

from accelerate_megatron.errors import BatchError, CheckpointError, UnsupportedError
from accelerate_megatron.failures import Failure, common_failure, name_ranks, on_every_rank


class OneRanksOwnError(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "otherwise", "raised"),
    [
        (UnsupportedError("no"), None, UnsupportedError("no")),
        (OSError("disk full"), None, OSError("disk full")),
        (OneRanksOwnError("odd"), None, RuntimeError("OneRanksOwnError: odd")),
        (KeyError("x"), None, RuntimeError("KeyError: 'x'")),
        (OSError("disk full"), CheckpointError, CheckpointError("OSError: disk full")),
        (UnsupportedError("no"), CheckpointError, UnsupportedError("no")),
    ],
)
def test_an_error_is_raised_again_as_a_type_that_every_rank_has(error, otherwise, raised):
    again = Failure.of(error, otherwise=otherwise).exception()

    assert type(again) is type(raised)
    assert str(again) == str(raised)


def test_a_class_that_only_has_the_name_of_one_of_ours_is_not_taken_for_it():
    other = type("BatchError", (Exception,), {})

    assert Failure.of(other("x")) == Failure("RuntimeError", "BatchError: x")


def test_ranks_are_named_unless_all_met_the_same():
    same = Failure("BatchError", "short")
    other = Failure("BatchError", "long")

    assert common_failure({0: same, 1: same}, 2) == same
    assert common_failure({0: same}, 2).text == "rank 0: short"
    assert common_failure({3: other, 0: same, 1: same}, 4, name="data-parallel rank").text == (
        "data-parallel ranks 0, 1: short\ndata-parallel rank 3: long"
    )


def test_results_come_back_by_rank_and_a_failure_of_another_rank_is_raised_here():
    assert on_every_rank(lambda: 1, lambda told: [told, (2, None)]) == [1, 2]
    with pytest.raises(BatchError, match=r"^rank 1: short$"):
        on_every_rank(lambda: 1, lambda told: [told, (None, Failure("BatchError", "short"))])


def test_the_failing_ranks_own_error_stays_the_cause():
    error = OSError("disk full")

    def fail() -> None:
        raise error

    with pytest.raises(CheckpointError) as raised:
        on_every_rank(fail, lambda told: [told], otherwise=CheckpointError)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 2, 3, 4, 5, 7], "ranks 0, 2-5, 7"), ([0, 1], "ranks 0, 1")],
)
def test_runs_of_ranks_are_written_short(ranks, text):
    assert name_ranks(ranks) == text
