"""How many updates the dummy scheduler's batches are, and which number wins."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_megatron.config.schedule import ScheduleSources, resolve_schedule
from accelerate_megatron.errors import ConfigurationError

UNSET = dict.fromkeys(
    (
        "train_iters",
        "train_samples",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_fraction",
        "start_weight_decay",
        "end_weight_decay",
        "other_megatron_args",
    )
)
DEFAULTS = {"lr_decay_style": "linear", "min_lr": 0.0, "weight_decay_incr_style": "constant"}


def resolve(
    total: int | None = None,
    warmup: int = 0,
    *,
    length: int | None = None,
    dp: int = 1,
    micro: int = 1,
    **plugin: Any,
) -> Any:
    sources = ScheduleSources(
        total_batches=total,
        warmup_batches=warmup,
        loader_length=length,
        updates_per_epoch=None if length is None else math.ceil(length / (dp * micro)),
        batches_per_update=Fraction(dp * micro),
        global_batch_size=2 * dp * micro,
    )
    return resolve_schedule(SimpleNamespace(**(UNSET | DEFAULTS | plugin)), sources)


@pytest.mark.parametrize(
    ("dp", "micro", "updates", "warmup_updates"),
    # 3 epochs of 10 batches, warm-up of 5: by hand, ceil(10 / k) x 3 and ceil(5 / k).
    [(1, 1, 30, 5), (2, 1, 15, 3), (4, 1, 9, 2), (1, 4, 9, 2), (2, 4, 6, 1), (4, 4, 3, 1)],
)
def test_whole_epochs_end_with_an_update_of_their_own(
    dp: int, micro: int, updates: int, warmup_updates: int
) -> None:
    schedule = resolve(30, 5, length=10, dp=dp, micro=micro)

    assert (schedule.decay_steps, schedule.warmup_steps) == (updates, warmup_updates)
    assert schedule.steps_per_update == 1


@pytest.mark.parametrize(
    ("dp", "micro", "updates"),
    # 25 batches are no whole number of epochs of 10: ceil(25 / k).
    [(1, 1, 25), (2, 1, 13), (4, 1, 7), (1, 4, 7), (2, 4, 4), (4, 4, 2)],
)
def test_any_other_total_is_divided_once(dp: int, micro: int, updates: int) -> None:
    assert resolve(25, length=10, dp=dp, micro=micro).decay_steps == updates


def test_a_loader_of_unknown_length_divides_the_total() -> None:
    assert resolve(30, dp=2, micro=2).decay_steps == 8


def test_the_plugins_updates_win_over_the_schedulers_batches() -> None:
    schedule = resolve(30, 5, length=10, dp=2, train_iters=100, lr_warmup_iters=7)

    assert (schedule.decay_steps, schedule.warmup_steps) == (100, 7)


def test_the_decay_may_end_before_the_training() -> None:
    assert resolve(train_iters=100, lr_decay_iters=60).decay_steps == 60


def test_the_fraction_is_of_the_decay() -> None:
    schedule = resolve(train_iters=100, lr_decay_iters=60, lr_warmup_fraction=0.05)

    assert schedule.warmup_steps == pytest.approx(3.0)


def test_samples_are_counted_by_the_batch() -> None:
    schedule = resolve(train_samples=800, lr_warmup_samples=80, dp=2, micro=4)

    assert (schedule.decay_steps, schedule.warmup_steps) == (800, 80)
    assert schedule.steps_per_update == 16


def test_the_dummys_warm_up_counts_where_samples_are_counted() -> None:
    # 5 batches of one rank are, over 2 x 4 of an update, one update of 16 samples.
    schedule = resolve(warmup=5, train_samples=800, dp=2, micro=4)
    asked = resolve(warmup=5, train_samples=800, lr_warmup_samples=0, dp=2, micro=4)

    assert (schedule.warmup_steps, asked.warmup_steps) == (16, 0)


def test_the_fraction_is_of_the_samples_too() -> None:
    schedule = resolve(train_samples=800, lr_decay_samples=400, lr_warmup_fraction=0.1)

    assert (schedule.decay_steps, schedule.warmup_steps) == (400, pytest.approx(40))


def test_style_and_least_rate_are_the_plugins() -> None:
    schedule = resolve(train_iters=10, lr_decay_style="cosine", min_lr=1e-5)

    assert (schedule.decay_style, schedule.min_lr) == ("cosine", 1e-5)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({}, "has no length: give total_num_steps to MegatronLMDummyScheduler"),
        (
            {"train_iters": 10, "lr_warmup_samples": 5},
            "lr_warmup_samples=5 counts samples, but the training is counted in updates",
        ),
        (
            {"train_samples": 10, "lr_warmup_iters": 5},
            "lr_warmup_iters=5 counts updates, but the training is counted in samples",
        ),
        ({"train_iters": 10, "lr_warmup_iters": 10}, "warm up over 10 updates and decay until 10"),
        ({"train_samples": 8, "lr_warmup_samples": 9}, "warm up over 9 samples and decay until 8"),
    ],
    ids=["none", "warm-up samples", "warm-up iters", "warm-up too long", "samples too long"],
)
def test_numbers_that_do_not_fit_are_refused(plugin: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(**plugin)


def test_samples_need_the_batch_size() -> None:
    with pytest.raises(ConfigurationError, match="in samples needs the batch size"):
        resolve_schedule(
            SimpleNamespace(**(UNSET | DEFAULTS | {"train_samples": 8})), ScheduleSources()
        )
