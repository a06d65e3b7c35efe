"""A model without weights starts as transformers would initialise it, on every layout alike."""

from __future__ import annotations

import pytest
import torch
from accelerate import init_empty_weights

from accelerate_megatron.models.registry import family_of
from accelerate_megatron.weights import initialised
from accelerate_megatron.weights.choosing import choose_weights
from accelerate_megatron.weights.initialised import InitialisedSource
from tests.helpers.tiny_models import TinyModel

FAMILIES = ["gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2"]


def empty_model(recipe: TinyModel):
    config = recipe.config()
    config.name_or_path = ""
    with init_empty_weights(include_buffers=False):
        return type(recipe.build())(config)


def source_of(model) -> InitialisedSource:
    family = family_of(model.config)
    source = choose_weights(model, family, family.shape(model.config), None).source
    assert isinstance(source, InitialisedSource)
    return source


def whole(source: InitialisedSource, name: str) -> torch.Tensor:
    return source.read(name, tuple(slice(0, size) for size in source.shape(name)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_distributed_as_transformers_initialises_it(family):
    changes = {"initializer_range": 0.05, "vocab_size": 999}
    recipe = TinyModel(family, tied=False, changes=changes)
    if family != "gpt2":
        recipe.changes["pad_token_id"] = 3
    torch.manual_seed(0)
    oracle = type(recipe.build())(recipe.config())

    source = source_of(empty_model(recipe))

    wanted = dict(oracle.named_parameters())
    assert set(source.names()) == wanted.keys()
    for name, value in wanted.items():
        made = whole(source, name)
        if value.dim() == 1:
            assert torch.equal(made, value)
            continue
        # A deviation estimated from n values is known to about 1 / sqrt(2n) of itself.
        assert made.std().item() == pytest.approx(value.std().item(), rel=0.08), name
        assert abs(made.mean().item()) < 5 * 0.05 / value.numel() ** 0.5, name
        assert torch.equal(made == 0, value == 0), name


def test_a_slice_is_the_slice_of_the_whole_tensor(monkeypatch):
    monkeypatch.setattr(initialised, "_BLOCK_ELEMENTS", 7 * 64)
    source = InitialisedSource(
        {"a.weight": (100, 64), "b.weight": (64,)},
        family_of(TinyModel("llama").config()).shape(TinyModel("llama").config()),
        zero_rows={"a.weight": 52},
    )
    everything = whole(source, "a.weight")

    for rows in (slice(0, 7), slice(5, 50), slice(49, 100), slice(13, 13)):
        part = source.read("a.weight", (rows, slice(3, 20)))
        assert torch.equal(part, everything[rows, 3:20])
    assert torch.nonzero((everything == 0).all(dim=1)).flatten().tolist() == [52]
    assert torch.equal(source.read("b.weight", (slice(2, 9),)), torch.ones(7))


def test_the_seed_and_the_name_decide_the_values():
    source = source_of(empty_model(TinyModel("llama")))
    name = "model.layers.0.mlp.up_proj.weight"
    first = whole(source, name)

    assert torch.equal(first, whole(source, name))
    assert not torch.equal(first, whole(source, "model.layers.1.mlp.up_proj.weight"))
    source.seed = 1
    assert not torch.equal(first, whole(source, name))


def test_it_is_said_once(caplog):
    model = empty_model(TinyModel("qwen2", changes={"initializer_range": 0.0123}))
    with caplog.at_level("INFO", logger="accelerate_megatron"):
        source_of(model)
        source_of(model)

    said = [record.message for record in caplog.records if "is initialised" in record.message]
    assert len(said) == 1
    assert "initializer_range 0.0123" in said[0]
    assert "weights=FOLDER" in said[0]
