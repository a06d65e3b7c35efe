"""The families of BERT: heads by class, tables that name every parameter, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.planning.config_file import read_config
from accelerate_megatron.weights.placements import expected_hf_shapes
from tests.helpers.tiny_encoders import ENCODERS
from tests.helpers.tiny_models import TinyModel

FAMILIES = ["bert", "megatron-bert"]


def config_of(family: str, **changes: object) -> PreTrainedConfig:
    config = TinyModel(family, changes=changes).config()
    config.architectures = [ENCODERS[family][1].__name__]
    return config


@pytest.mark.parametrize("family", ENCODERS)
def test_the_table_names_every_parameter_of_the_class_with_its_shape(family: str) -> None:
    model = TinyModel(family, changes={"num_labels": 3, "type_vocab_size": 4}).build()
    config = config_of(family, num_labels=3, type_vocab_size=4)
    shape = family_of(config).shape(config)

    expected = expected_hf_shapes(family_of(config).parameters(shape), shape)

    assert expected == {name: tuple(value.shape) for name, value in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_names_no_class_is_a_masked_language_model(family: str) -> None:
    config = TinyModel(family).config()

    shape = family_of(config).shape(config)

    assert shape.encoder is not None
    assert shape.encoder.head == "masked_lm"
    assert shape.tied_embeddings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"is_decoder": True}, "is_decoder is True: .*encoder only", id="decoder"),
        pytest.param({"add_cross_attention": True}, "add_cross_attention is True", id="cross"),
        pytest.param({"hidden_act": "tanh"}, "hidden_act is 'tanh'", id="activation"),
        pytest.param({"num_attention_heads": 5}, "multiple of num_attention_heads", id="heads"),
        pytest.param({"tie_word_embeddings": False}, "tie_word_embeddings is False", id="untied"),
        pytest.param(
            {"position_embedding_type": "relative_key"}, "is 'relative_key'; supported", id="places"
        ),
    ],
)
def test_what_cannot_be_represented_is_refused_by_field_and_value(
    family: str, changes: dict[str, object], message: str
) -> None:
    config = config_of(family, **changes)

    with pytest.raises(UnsupportedError, match=message):
        family_of(config).shape(config)


@pytest.mark.parametrize("family", ["bert-classifier", "megatron-bert-pretraining", "bert"])
def test_planning_reads_the_same_shape_from_the_file(family: str, tmp_path: Path) -> None:
    config = config_of(family, num_labels=5)
    config.save_pretrained(tmp_path)

    assert family_of(config).shape(read_config(tmp_path)) == family_of(config).shape(config)


def test_a_problem_type_that_transformers_has_not_is_refused() -> None:
    config = config_of("bert-classifier")
    config.problem_type = "ranking"

    with pytest.raises(UnsupportedError, match="problem_type is 'ranking'; it must be one of"):
        family_of(config).shape(config)


def test_a_class_without_a_supported_head_is_refused_with_those_that_have_one() -> None:
    config = replace_class("bert", "BertForQuestionAnswering")

    with pytest.raises(UnsupportedError, match=r"BertForQuestionAnswering; .*BertForMaskedLM"):
        family_of(config)


def replace_class(family: str, name: str) -> PreTrainedConfig:
    config = TinyModel(family).config()
    config.architectures = [name]
    return config


def test_the_classifiers_dropout_is_the_hidden_one_unless_the_config_has_its_own() -> None:
    shapes = [
        family_of(config).shape(config)
        for config in (
            config_of("bert-classifier"),
            config_of("bert-classifier", classifier_dropout=0.3),
        )
    ]

    assert [shape.encoder and shape.encoder.classifier_dropout for shape in shapes] == [None, 0.3]
    assert replace(shapes[0], encoder=shapes[1].encoder) == shapes[1]
