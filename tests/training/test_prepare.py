"""`prepare`: what it returns, what it leaves alone, and what it refuses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS, WITH_DROPOUT, hf_loss, start

SAMPLES = ragged_samples(8)


class CountingDataset(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.taken: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.taken.append(index)
        return SAMPLES[index]


def what_prepare_touches() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    model = WITH_DROPOUT.build()
    optimizer = SGD.build(model)
    dataset = CountingDataset()
    loader = DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=pad_samples)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=8)

    def states() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    before = states()
    results = accelerator.prepare(loader, scheduler, model, optimizer, loader)
    after_prepare = states()
    plugin = accelerator.state.megatron_lm_plugin
    taken = list(dataset.taken)
    batch = next(iter(results[0]))
    drawn_by_loader = states()
    results[2](**batch)
    return {
        "random": before == after_prepare,
        "random after update": drawn_by_loader == states(),
        "taken": taken,
        "kinds": [type(result).__name__ for result in results],
        "sizes": (plugin.micro_batch_size, plugin.global_batch_size, plugin.data_parallel_size),
    }


@pytest.fixture(scope="module")
def touched() -> Any:
    return run_ranks(what_prepare_touches, num_ranks=2)


def test_prepare_takes_no_batch(touched: Any) -> None:
    assert [told["taken"] for told in touched] == [[], []]


def test_prepare_moves_no_random_state(touched: Any) -> None:
    assert [told["random"] for told in touched] == [True, True]


def test_an_update_with_dropout_moves_no_random_state(touched: Any) -> None:
    assert [told["random after update"] for told in touched] == [True, True]


def test_prepare_returns_its_objects_in_the_order_given(touched: Any) -> None:
    assert touched[0]["kinds"] == [
        "PreparedDataLoader",
        "PreparedScheduler",
        "MegatronModel",
        "PreparedOptimizer",
        "PreparedDataLoader",
    ]


def test_the_plugin_knows_the_batch_sizes_after_prepare(touched: Any) -> None:
    assert touched[0]["sizes"] == (2, 2, 1)


def prepare_again(what: str) -> Any:
    started = start(num_micro_batches=2)
    accelerator = started.accelerator
    if what == "loader":
        loader = DataLoader(SAMPLES, batch_size=2, collate_fn=pad_samples)
        loader = accelerator.prepare(loader)
        started.model.eval()
        return [started.model(**batch).loss.item() for batch in loader]
    if what == "prepared":
        return accelerator.prepare(started.model, started.loader) == (started.model, started.loader)
    if what == "weights":
        return accelerator.prepare(started.loader, weights="a/folder")
    other = TWO_LAYERS.build()
    optimizer = SGD.build(other)
    parts = {
        "model": [other],
        "optimizer": [optimizer],
        "scheduler": [MegatronLMDummyScheduler(optimizer)],
    }
    return accelerator.prepare(*parts[what])


def test_another_loader_can_be_prepared_later() -> None:
    (losses,) = run_ranks(prepare_again, "loader", num_ranks=1)

    assert losses == pytest.approx([hf_loss(SAMPLES[:4]), hf_loss(SAMPLES[4:])], abs=1e-5)


def test_what_is_prepared_already_is_returned_as_it_is() -> None:
    assert run_ranks(prepare_again, "prepared", num_ranks=1) == [True]


@pytest.mark.parametrize("what", ["model", "optimizer", "scheduler"])
def test_another_model_optimizer_or_scheduler_is_refused(what: str) -> None:
    with pytest.raises(ConfigurationError, match=f"prepare got another {what}"):
        run_ranks(prepare_again, what, num_ranks=1)


def test_weights_after_the_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="prepare got weights after the model"):
        run_ranks(prepare_again, "weights", num_ranks=1)


def prepare_after_free_memory() -> Any:
    started = start(tp_degree=2)
    batch = next(iter(started.loader))
    started.model(**batch)
    accelerator = started.accelerator
    model, optimizer = accelerator.free_memory(started.model, started.optimizer)
    assert (model, optimizer) == (None, None)
    model = TinyModel("llama").build()
    model, optimizer = accelerator.prepare(model, SGD.build(model))
    return model(**pad_samples(SAMPLES[:2])).loss.item()


def test_after_free_memory_another_model_can_be_prepared() -> None:
    losses = run_ranks(prepare_after_free_memory, num_ranks=2)

    oracle = oracle_run(OracleCase(TinyModel("llama"), SGD, [pad_samples(SAMPLES[:2])]))
    assert losses == pytest.approx([oracle.losses[0]] * 2, abs=1e-5)


def prepare(*kinds: str) -> Any:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    model = TWO_LAYERS.build()
    optimizer = TinyOptimizer().build(model)
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": MegatronLMDummyScheduler(optimizer, total_num_steps=8),
        "real scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        "text": "model",
        "unbatched": DataLoader(SAMPLES, batch_size=None),
    }
    return accelerator.prepare(*[parts[kind] for kind in kinds])


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        (
            ("model", "optimizer", "real scheduler"),
            UnsupportedError,
            r"prepare is a torch.optim.lr_scheduler.LambdaLR; .*MegatronLMDummyScheduler",
        ),
        (("model", "text"), UnsupportedError, "argument 2 of prepare is a builtins.str"),
        (("model", "model"), ConfigurationError, "prepare got 2 models"),
        (("optimizer",), ConfigurationError, "prepare needs the model"),
        (("model", "scheduler"), ConfigurationError, "a scheduler without its optimizer"),
        (("model", "unbatched"), ConfigurationError, "batch_size None"),
    ],
    ids=["real-scheduler", "text", "two-models", "no-model", "no-optimizer", "no-batch-size"],
)
def test_objects_that_cannot_be_prepared_are_refused_alike(
    kinds: tuple[str, ...], error: type[Exception], message: str
) -> None:
    errors = run_ranks(prepare, *kinds, num_ranks=2, errors="return")

    assert [type(caught) for caught in errors] == [error, error]
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(error, match=message):
        raise errors[0]


@pytest.mark.parametrize("method", ["prepare_model", "prepare_optimizer", "prepare_scheduler"])
def test_parts_are_not_prepared_alone(method: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{method} cannot be used"):
        run_ranks(call_alone, method, num_ranks=1)


def call_alone(method: str) -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    getattr(accelerator, method)(TWO_LAYERS.build())
