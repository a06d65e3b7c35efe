"""Weights of a Hugging Face model, through a checkpoint, and out again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import SGD, start

GPT2 = TinyModel("gpt2", changes={"n_layer": 2})  # tied, as the checkpoints that would not load
OTHER_WEIGHTS = replace(GPT2, seed=99)
BATCH = pad_samples(ragged_samples(4))


def save_untrained(folder: str, plugin: dict[str, Any]) -> None:
    start(GPT2, **plugin).accelerator.save_state(folder)


def load_into_other_weights(folder: str, plugin: dict[str, Any]) -> tuple[list[float], Any]:
    started = start(OTHER_WEIGHTS, optimizer=SGD, **plugin)
    started.model.eval()
    losses = [started.model(**BATCH).loss.item()]
    started.accelerator.load_state(folder)
    losses.append(started.model(**BATCH).loss.item())
    return losses, started.model.gather_state_dict()


def hf_loss(recipe: TinyModel) -> float:
    with torch.no_grad():
        return float(recipe.build().eval()(**BATCH).loss)


def test_a_converted_model_is_loaded_with_its_loss_and_leaves_bit_for_bit(tmp_path: Path) -> None:
    folder, plugin = str(tmp_path / "converted"), {"tp_degree": 2}
    run_ranks(save_untrained, folder, plugin, num_ranks=2)

    results = run_ranks(load_into_other_weights, folder, plugin, num_ranks=2)

    for losses, _ in results:
        assert losses == pytest.approx([hf_loss(OTHER_WEIGHTS), hf_loss(GPT2)], abs=1e-5)
    exported, wanted = results[-1][1], GPT2.build().state_dict()
    assert exported.keys() == {name for name, _ in GPT2.build().named_parameters()}
    assert all(torch.equal(exported[name], wanted[name]) for name in exported)
