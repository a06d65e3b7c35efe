"""The table of the plugin's fields is Accelerate's, and reads words strictly."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from accelerate.utils import MegatronLMPlugin as UpstreamPlugin

from accelerate_megatron.config.plugin_fields import FALSE_WORDS, FIELD, FIELDS, TRUE_WORDS
from accelerate_megatron.errors import ConfigurationError


def test_the_fields_are_accelerates_in_its_order() -> None:
    assert [field.name for field in FIELDS] == [f.name for f in dataclasses.fields(UpstreamPlugin)]
    assert len(FIELDS) == 63


def test_the_variable_is_the_name_in_capitals() -> None:
    assert FIELD["tp_degree"].variable == "MEGATRON_LM_TP_DEGREE"


@pytest.mark.parametrize("word", [*TRUE_WORDS, *FALSE_WORDS, "TRUE", "False", " Yes "])
def test_boolean_words_are_read_in_any_case(word: str) -> None:
    value = FIELD["sequence_parallelism"].parse(word, "--sequence_parallelism")

    assert value is (word.strip().lower() in TRUE_WORDS)


@pytest.mark.parametrize(
    ("field", "word", "value"),
    [
        ("tp_degree", "2", 2),
        ("gradient_clipping", "0.5", 0.5),
        ("gradient_clipping", "1", 1.0),
        ("lr_decay_style", "cosine", "cosine"),
        ("consumed_samples", "8,0,0", [8, 0, 0]),
        ("consumed_samples", "[8, 4]", [8, 4]),
        ("train_iters", "None", None),
        ("seq_length", "none", None),
    ],
)
def test_words_become_values_of_the_fields_kind(field: str, word: str, value: Any) -> None:
    assert FIELD[field].parse(word, "--flag") == value


@pytest.mark.parametrize(
    ("field", "word", "message"),
    [
        ("tp_degree", "two", r"--flag is 'two'; it must be a whole number"),
        ("tp_degree", "2.5", r"--flag is '2.5'; it must be a whole number"),
        ("gradient_clipping", "high", r"--flag is 'high'; it must be a number"),
        ("sequence_parallelism", "2", r"--flag is '2'; it must be one of true, 1, yes, on"),
        ("sequence_parallelism", "maybe", r"'maybe'.* or one of false, 0, no, off"),
        ("lr_decay_style", "sine", r"--flag is 'sine'; it must be one of constant, linear, cosine"),
        ("consumed_samples", "a,b", r"it must be numbers: 8,0,0"),
        ("custom_loss_function", "f", r"custom_loss_function is a Python object"),
    ],
)
def test_other_words_are_refused_with_their_source(field: str, word: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FIELD[field].parse(word, "--flag")
