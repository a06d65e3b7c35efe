"""Whether the output layer is the word embedding: of models in memory, and of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.tying import as_tied_in
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples


def shape_of(model: Any, weights: Path | None = None) -> ModelShape:
    family = family_of(model.config)
    return as_tied_in(model, family, family.shape(model.config), weights)


def with_own_head(model: Any) -> Any:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


@pytest.mark.parametrize(
    ("family", "embedding"),
    [
        ("gpt2", "transformer.wte.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("t5", "shared.weight"),
    ],
)
def test_a_config_unties_no_model_that_is_made(family: str, embedding: str) -> None:
    model = TinyModel(family).build()
    model.config.tie_word_embeddings = False

    with pytest.raises(ConfigurationError) as error:
        shape_of(model)

    assert f"lm_head.weight and {embedding} are one tensor" in str(error.value)
    assert "torch.nn.Parameter(model.lm_head.weight.detach().clone())" in str(error.value)
    assert not shape_of(with_own_head(model)).tied_embeddings


@pytest.mark.parametrize("family", ["llama", "megatron-bert"])
def test_a_config_ties_no_model_that_is_made(family: str) -> None:
    model = with_own_head(TinyModel(family).build())

    with pytest.raises(ConfigurationError, match=r"=True, but .*weight are two tensors") as error:
        shape_of(model)

    assert ("set it to False to train both" in str(error.value)) == (family == "llama")
    model.tie_weights()
    assert shape_of(model).tied_embeddings


def test_t5s_config_says_tied_and_its_tensors_decide() -> None:
    model = TinyModel("t5").build()

    assert model.config.tie_word_embeddings
    assert shape_of(model).tied_embeddings
    assert not shape_of(with_own_head(model)).tied_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_an_empty_t5_is_tied_as_in_its_folder(tied: bool, tmp_path: Path) -> None:
    TinyModel("t5", tied=tied).build().save_pretrained(tmp_path)
    empty = TinyModel("t5").build().to("meta")

    assert shape_of(empty, tmp_path).tied_embeddings is tied
    assert shape_of(empty).tied_embeddings


def untied_afterwards() -> tuple[float, float, dict[str, torch.Tensor]]:
    """Do a step with a GPT-2 that was untied after it was made; return both losses, and weights."""
    model = with_own_head(TinyModel("gpt2", changes={"n_layer": 2}).build())
    model.config.tie_word_embeddings = False
    batch = pad_samples(ragged_samples(2))
    with torch.no_grad():
        wanted = model.eval()(**batch).loss.item()
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    ours, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = ours(**batch).loss.item()
    return loss, wanted, ours.gather_state_dict()


def test_a_head_of_its_own_is_trained_apart() -> None:
    ((loss, wanted, state),) = run_ranks(untied_afterwards, num_ranks=1)

    assert loss == pytest.approx(wanted, abs=1e-5)
    assert not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
