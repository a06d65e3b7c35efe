"""Models on the meta device: filled from a folder, or initialised, on every layout alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate_megatron.errors import WeightsError
from tests.helpers.oracle_training import evaluate
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.parity.folders import prepare_empty

MODELS = [
    pytest.param(TinyModel("gpt2"), id="gpt2-tied"),
    pytest.param(TinyModel("phi3", tied=False), id="phi3-untied"),
    pytest.param(TinyModel("qwen2", changes={"vocab_size": 101}), id="qwen2-tied"),
]
LAYOUTS = [
    pytest.param(1, {}, id="1"),
    pytest.param(4, {"tp_degree": 2, "pp_degree": 2}, id="tp2-pp2"),
]


def check_filled(results, model: TinyModel) -> None:
    hf_model = model.build().eval()
    wanted = dict(hf_model.named_parameters())
    state = results[-1][1]
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    assert results[0][0] == pytest.approx(
        evaluate(hf_model, pad_samples(ragged_samples(4))), abs=1e-5
    )


@pytest.mark.parametrize(("num_ranks", "plugin"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_an_empty_model_is_filled_from_the_folder_of_its_config(
    model: TinyModel, num_ranks: int, plugin: dict[str, int], tmp_path: Path
) -> None:
    model.build().save_pretrained(tmp_path, max_shard_size="100KB")

    results = run_ranks(prepare_empty, str(tmp_path), plugin, num_ranks=num_ranks)

    check_filled(results, model)


def test_weights_may_come_from_a_folder_that_prepare_names(tmp_path: Path) -> None:
    model = TinyModel("llama", tied=False)
    model.build().save_pretrained(tmp_path)

    results = run_ranks(prepare_empty, model, {"tp_degree": 2}, str(tmp_path), num_ranks=2)

    check_filled(results, model)


def test_an_empty_model_without_a_folder_starts_the_same_on_every_layout() -> None:
    model = TinyModel("llama")

    (alone,) = run_ranks(prepare_empty, model, {}, num_ranks=1)
    cut = run_ranks(prepare_empty, model, {"tp_degree": 2, "pp_degree": 2}, num_ranks=4)

    state = cut[-1][1]
    assert all(torch.equal(state[name], value) for name, value in alone[1].items())
    assert cut[0][0] == pytest.approx(alone[0], abs=1e-5)


def test_a_bad_folder_fails_on_every_rank_alike(tmp_path: Path) -> None:
    TinyModel("gpt2").build().save_pretrained(tmp_path)

    errors = run_ranks(
        prepare_empty,
        TinyModel("llama"),
        {"tp_degree": 2},
        str(tmp_path),
        num_ranks=2,
        errors="return",
    )

    assert all(isinstance(error, WeightsError) for error in errors)
    assert len({str(error) for error in errors}) == 1
