"""Fields about indexed datasets, in a run that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.indexed.files import documents, write_files
from tests.training.start import start
from tests.training.test_indexed import TINY, prepare


def without_datasets(plugin: dict[str, Any]) -> str:
    try:
        start(**plugin)
    except ConfigurationError as error:
        return str(error)
    return "none"


def no_datasets(sizes: list[int | None]) -> list[Any]:
    raise AssertionError("nothing asks for datasets")


@pytest.mark.parametrize(
    ("plugin", "named"),
    [
        ({"eval_iters": 3}, "eval_iters, about"),
        ({"eval_interval": 3}, "eval_interval, about"),
        ({"custom_megatron_datasets_provider_function": no_datasets}, "datasets_provider_function"),
        ({"megatron_dataset_flag": True}, "megatron_dataset_flag, about"),
    ],
    ids=["iters", "interval", "provider", "flag"],
)
def test_fields_about_datasets_are_refused_where_there_are_none(
    plugin: dict[str, Any], named: str
) -> None:
    first, second = run_ranks(without_datasets, plugin, num_ranks=2)

    assert first == second
    assert named in first
    assert "Give prepare one in the call with the model, or leave it out" in first


def two_models(prefix: str) -> float:
    """Train on indexed datasets, drop the model, and evaluate another on ordinary batches."""
    accelerator, _, _ = prepare(prefix, {"train_iters": 1}, eval_iters=4)
    accelerator.free_memory()
    plugin = accelerator.state.megatron_lm_plugin
    plugin.eval_iters, plugin.eval_interval = 100, 1000
    model = accelerator.prepare(TINY.build()).eval()
    ids = torch.arange(16).reshape(2, 8)
    return model(input_ids=ids, labels=ids).loss.item()


def test_what_a_dummy_loader_has_set_does_not_outlive_its_model(tmp_path: Path) -> None:
    [loss] = run_ranks(two_models, write_files(tmp_path / "a", documents(60, 0)), num_ranks=1)

    assert loss > 0
