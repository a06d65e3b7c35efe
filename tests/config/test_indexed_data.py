"""What MegatronLMDummyDataLoader is told, without any file: shares, blends, paths."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_megatron import MegatronLMPlugin
from accelerate_megatron.config.indexed_data import (
    Blend,
    data_arguments,
    read_blend,
    resolve_indexed_data,
    split_shares,
)
from accelerate_megatron.errors import ConfigurationError


def test_shares_of_splits_are_of_sum_1() -> None:
    assert split_shares("969, 30, 1") == (0.969, 0.03, 0.001)
    assert split_shares("3") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("split", ["", "90, ten", "1, 1, 1, 1", "0, 0, 0", "-1, 2", "inf, 1"])
def test_other_shares_are_refused_with_an_example(split: str) -> None:
    with pytest.raises(ConfigurationError, match=r"shares of train.*'90, 10, 0'"):
        split_shares(split)


@pytest.mark.parametrize(
    ("path", "blend"),
    [
        ("corpus", Blend(("corpus",))),
        (["a", "b"], Blend(("a", "b"))),
        ([0.3, "a", "0.7", "b"], Blend(("a", "b"), (0.3, 0.7))),
    ],
)
def test_a_blend_is_read_in_each_form(path: Any, blend: Blend) -> None:
    assert read_blend(path) == blend


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], r"it has to be a prefix, a list of prefixes, or weights and prefixes in turn"),
        (7, r"data_path is 7; it has to be a prefix"),
        (["0.3", "a", "b", "c"], r"holds 'b' where a weight or a prefix is expected"),
        (["a", None], r"holds None where a weight"),
        ([0.0, "a", 1.0, "b"], r"has the weights \[0.0, 1.0\]; each has to be above 0"),
    ],
)
def test_other_blends_are_refused(path: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_blend(path)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"data_path": "a", "valid_data_path": "b"}, r"data_path and valid_data_path were given"),
        ({"train_data_path": "a", "split": "1"}, r"split='1' cuts data_path up, but each split"),
        ({"train_data_path": "a", "splits_string": "2"}, r"split='2' cuts data_path up"),
        ({"data_path": "a", "split": "1", "splits_string": "1, 1"}, r"both name the same shares"),
        ({}, r"needs data_path, or train_data_path"),
    ],
)
def test_paths_that_contradict_each_other_are_refused(paths: dict[str, Any], message: str) -> None:
    arguments = data_arguments({"seq_length": 8, "micro_batch_size": 1, **paths})

    with pytest.raises(ConfigurationError, match=message):
        resolve_indexed_data(arguments, MegatronLMPlugin())


def test_the_documented_name_of_the_shares_acts() -> None:
    given = {"data_path": "a", "splits_string": "8, 1, 1", "seq_length": 8, "micro_batch_size": 1}

    assert resolve_indexed_data(data_arguments(given), MegatronLMPlugin()).shares == (0.8, 0.1, 0.1)
