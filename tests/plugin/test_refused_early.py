"""What is refused while a model is prepared: before weights are imported, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accelerate_megatron import GPTTrainStep
from accelerate_megatron.errors import ConfigurationError, UnsupportedError, WeightsError
from accelerate_megatron.training import assemble
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.plugin.test_custom import own_model
from tests.training.start import TWO_LAYERS, start


class UncutStep(GPTTrainStep):
    """A step that does not say that its batches can be cut."""

    splits_sequences = False


class StepThatFailsOnRank1(GPTTrainStep):
    def __init__(self, megatron_args: Any) -> None:
        super().__init__(megatron_args)
        if dist.get_rank() == 1:
            raise KeyError("loss_weights")


def no_import(*_args: Any, **_kwargs: Any) -> None:
    raise AssertionError("the weights were imported")


def prepare_without_weights(plugin: dict[str, Any]) -> None:
    assemble.import_weights = no_import
    start(TWO_LAYERS, batch_size=2, **plugin)


def check_alike(errors: list[Any], kind: type[Exception], message: str) -> None:
    assert [type(error) for error in errors] == [kind] * len(errors)
    assert len({str(error) for error in errors}) == 1
    assert message in str(errors[0])


@pytest.mark.parametrize(
    ("plugin", "kind", "message"),
    [
        ({"consumed_samples": [6]}, ConfigurationError, "it must be a multiple: 4 or 8"),
        (
            {"context_parallel_size": 2, "custom_train_step_class": UncutStep},
            UnsupportedError,
            "set splits_sequences = True on its class",
        ),
        (
            {"custom_train_step_class": StepThatFailsOnRank1},
            RuntimeError,
            "rank 1: KeyError: 'loss_weights'",
        ),
    ],
    ids=["consumed samples", "step that is not cut", "step that fails on one rank"],
)
def test_no_weights_are_imported_for_a_run_that_is_refused(
    plugin: dict[str, Any], kind: type[Exception], message: str
) -> None:
    errors = run_ranks(prepare_without_weights, plugin, num_ranks=2, errors="return")

    check_alike(errors, kind, message)


def with_more_on_the_last_stage(pre_process: bool, post_process: bool, config: Any) -> Any:
    model = own_model(pre_process, post_process, config)
    if post_process:
        model.extra = torch.nn.Linear(3, 3)
    return model


def test_a_parameter_that_has_no_weights_on_one_stage_is_refused_on_all() -> None:
    plugin = {"pp_degree": 2, "custom_model_provider_function": with_more_on_the_last_stage}

    errors = run_ranks(prepare_with, plugin, num_ranks=2, errors="return")

    check_alike(errors, WeightsError, "rank 1: ")
    assert "extra" in str(errors[0])


def prepare_with(plugin: dict[str, Any]) -> None:
    start(TWO_LAYERS, **plugin)


def prepare_a_second_loader(consumed: list[int]) -> None:
    started = start(TWO_LAYERS, batch_size=2, consumed_samples=consumed)
    more = DataLoader(ragged_samples(8), batch_size=2, collate_fn=pad_samples)
    started.accelerator.prepare(more)


def test_consumed_samples_of_a_loader_that_is_prepared_later_are_looked_at_too() -> None:
    errors = run_ranks(prepare_a_second_loader, [4, 3], num_ranks=2, errors="return")

    check_alike(errors, ConfigurationError, "consumed_samples has 3 for a DataLoader of which one")
