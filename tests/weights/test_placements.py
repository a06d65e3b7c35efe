from __future__ import annotations

import pytest

from accelerate_megatron.errors import UnsupportedError, WeightsError
from accelerate_megatron.models.parameters import Direct, PackedGateUp, PackedQKV
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.weights.checks import collapse_layers
from accelerate_megatron.weights.placements import expected_hf_shapes, placements
from tests.weights.cutting import packed
from tests.weights.tiny import MODELS, tiny_llama


def _tables(model):
    family = family_of(model.config)
    shape = family.shape(model.config)
    return family.parameters(shape), shape


@pytest.mark.parametrize(("build", "changes"), MODELS)
def test_the_expected_shapes_are_those_of_the_hf_model(build, changes):
    model = build(**changes)

    expected = expected_hf_shapes(*_tables(model))

    assert expected == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("build", "changes"), MODELS)
def test_the_placed_parameters_have_the_shapes_of_the_packed_ones(build, changes):
    model = build(**changes)

    placed = placements(*_tables(model))

    assert {name: placement.shape for name, placement in placed.items()} == {
        name: tuple(tensor.shape) for name, tensor in packed(model).items()
    }


def test_parameters_are_placed_layer_by_layer():
    names = list(placements(*_tables(tiny_llama())))

    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0] == "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"decoder.final_layernorm.weight": Direct("model.embed_tokens.weight")},
            r"model\.embed_tokens\.weight is in embedding\.word_embeddings\.weight and in "
            r"decoder\.final_layernorm\.weight",
            id="tensor-used-twice",
        ),
        pytest.param(
            {"decoder.layers.{layer}.mlp.linear_fc1.weight": PackedGateUp(gate="w", up="w")},
            r"Row 0 of w has no place or two in decoder\.layers\.0\.mlp\.linear_fc1\.weight",
            id="row-used-twice",
        ),
        pytest.param(
            {"decoder.layers.{layer}.mlp.linear_fc2.weight": PackedQKV(q="q", k="k", v="v")},
            r"segments of decoder\.layers\.0\.mlp\.linear_fc2\.weight do not add up to its 64 rows",
            id="rows-do-not-add-up",
        ),
    ],
)
def test_a_wrong_table_is_refused(changes, message):
    table, shape = _tables(tiny_llama())

    with pytest.raises(WeightsError, match=message):
        placements({**table, **changes}, shape)


def test_a_table_with_an_unknown_megatron_parameter_is_refused():
    table, shape = _tables(tiny_llama())

    with pytest.raises(UnsupportedError, match=r"table of 'llama' names 'router\.weight', which"):
        placements({**table, "router.weight": Direct("w")}, shape)


def test_names_that_differ_in_the_layer_only_are_written_as_one():
    names = ["x.10.a", "x.2.a", "x.0.a", "x.1.a", "x.1.b", "c", "x.3.experts.0.d"]

    assert collapse_layers(names) == ["c", "x.1.b", "x.3.experts.0.d", "x.{0-2,10}.a"]
