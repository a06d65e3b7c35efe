"""The learning rate over the updates of a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyOptimizer, pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS


def follow_the_rate(plugin: dict[str, Any], total: int | None, warmup: int) -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    model = TWO_LAYERS.build()
    optimizer = TinyOptimizer("sgd", {"lr": 1.0}, groups=(("ln_", {"lr": 0.5}),)).build(model)
    scheduler = MegatronLMDummyScheduler(optimizer, total, warmup)
    loader = DataLoader(ragged_samples(12), batch_size=1, collate_fn=pad_samples)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = [scheduler.get_last_lr()]
    for batch in loader:
        model(**batch)
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return rates


@pytest.mark.parametrize(
    ("plugin", "total", "warmup", "wanted"),
    [
        ({}, 12, 6, [0.0, 1.0, 0.0]),
        ({"num_micro_batches": 3}, 12, 3, [0.0, 1.0, 0.0]),
        ({"train_iters": 4, "min_lr": 0.2, "lr_decay_style": "cosine"}, None, 0, None),
        ({"train_samples": 12, "lr_warmup_samples": 6}, None, 0, [0.0, 1.0, 0.0]),
        ({"lr_decay_style": "constant"}, 12, 0, [1.0, 1.0, 1.0]),
    ],
    ids=["batches", "micro", "cosine", "samples", "constant"],
)
def test_the_rate_of_every_group_follows_the_schedule(
    plugin: dict[str, Any], total: int | None, warmup: int, wanted: list[float] | None
) -> None:
    plugin = {"num_micro_batches": 6, **plugin}

    (rates,) = run_ranks(follow_the_rate, plugin, total, warmup, num_ranks=1)

    if wanted is None:
        assert [max(pair) for pair in rates] == pytest.approx([1.0, 0.8828427, 0.6])
        return
    if plugin["num_micro_batches"] == 3:
        wanted = [0.0, 1.0, 2 / 3, 1 / 3, 0.0]
    assert [max(pair) for pair in rates] == pytest.approx(wanted)
    assert [min(pair) for pair in rates] == pytest.approx([rate / 2 for rate in wanted])


def rate_with_a_smaller_loader() -> Any:
    """Prepare a train loader of 2 rows a batch with one of 1 row, which decides."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    model = TWO_LAYERS.build()
    optimizer = TinyOptimizer("sgd", {"lr": 1.0}).build(model)
    loaders = [
        DataLoader(ragged_samples(7), batch_size=rows, collate_fn=pad_samples) for rows in (2, 1)
    ]
    assert len(loaders[0]) == 4
    scheduler = MegatronLMDummyScheduler(optimizer, 4, 1)
    model, _, train, _, scheduler = accelerator.prepare(model, optimizer, *loaders, scheduler)
    run = model.session.run
    return len(train), run.micro_batch_size, run.schedule.decay_steps, run.schedule.warmup_steps


def test_the_schedule_counts_the_updates_of_the_micro_batch_that_was_chosen() -> None:
    ((length, rows, updates, warmup),) = run_ranks(rate_with_a_smaller_loader, num_ranks=1)

    assert (length, rows) == (7, 1)
    assert (updates, warmup) == (7, 2)


def prepare_with_min_lr() -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(min_lr=0.2))
    model = TWO_LAYERS.build()
    optimizer = SGD.build(model)
    accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer, total_num_steps=8))


def test_a_least_rate_above_the_rate_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"min_lr=0.2 is above .* \(0.1\)"):
        run_ranks(prepare_with_min_lr, num_ranks=1)


def warnings_after_each_update(min_lr: float) -> list[int]:
    """Go over a loader of two batches twice, with a schedule that is made for once."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate_megatron").addHandler(handler)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(min_lr=min_lr))
    model = TWO_LAYERS.build()
    optimizer = SGD.build(model)
    loader = DataLoader(ragged_samples(4), batch_size=2, collate_fn=pad_samples)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=len(loader))
    model, optimizer, loader, _ = accelerator.prepare(model, optimizer, loader, scheduler)
    counts = []
    for _ in range(2):
        for batch in loader:
            model(**batch)
            optimizer.step()
            counts.append(sum("the rate is 0" in message for message in said))
    return counts


@pytest.mark.parametrize(("min_lr", "counts"), [(0.0, [0, 0, 1, 1]), (0.01, [0, 0, 0, 0])])
def test_updates_beyond_a_schedule_that_ends_at_0_are_told_of_once(
    min_lr: float, counts: list[int]
) -> None:
    assert run_ranks(warnings_after_each_update, min_lr, num_ranks=1) == [counts]
