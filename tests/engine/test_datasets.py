"""Megatron's GPT datasets as we build them: the stream of tokens, masks, caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate_megatron import engine
from accelerate_megatron.config.indexed_data import Blend, IndexedData
from accelerate_megatron.errors import ConfigurationError
from tests.indexed.files import documents, write_files

SEQ_LENGTH = 16


@pytest.fixture(autouse=True)
def _engine_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # newer versions warn where no rank is to be found
    engine.activate("cpu")


def settings_for(prefix: str, **changes: Any) -> IndexedData:
    settings = IndexedData(
        blend=Blend((prefix,)),
        blends=(None, None, None),
        split="100,0,0",
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
        eod_token=0,
        vocab_size=99,
    )
    return replace(settings, **changes)


def test_the_samples_in_order_are_the_documents_and_overlap_by_one_token(tmp_path: Path) -> None:
    docs = documents(40)
    dataset = engine.build_gpt_datasets(settings_for(write_files(tmp_path / "a", docs)))[0]

    in_order = np.argsort(dataset.shuffle_index)
    samples = [dataset[int(place)] for place in in_order]

    stream = [token for number in dataset.document_index for token in docs[number]]
    assert sorted(dataset.document_index) == list(range(len(docs)))
    assert len(samples) == (len(stream) - 1) // SEQ_LENGTH
    for number, sample in enumerate(samples):
        start = number * SEQ_LENGTH
        assert sample["tokens"].tolist() == stream[start : start + SEQ_LENGTH]
        assert sample["labels"].tolist() == stream[start + 1 : start + SEQ_LENGTH + 1]


def test_a_padded_first_sample_masks_no_other(tmp_path: Path) -> None:
    from accelerate_megatron.engine import datasets

    prefix = write_files(tmp_path / "a", [[1] * 30])
    data = settings_for(prefix, split="0,100,0")
    config = datasets._config(data, {prefix: 0})
    config.drop_last_partial_validation_sequence = False
    builder = datasets.LocalBuilder(datasets.CheckedGPTDataset, [None] * 3, lambda: True, config)
    dataset = builder.build()[1]

    padded, whole = sorted(range(2), key=lambda n: int((dataset[n]["labels"] > 0).sum()))

    assert dataset[padded]["loss_mask"].sum() == 13
    assert dataset[whole]["loss_mask"].sum() == SEQ_LENGTH


def test_a_split_without_tokens_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate_megatron.engine import datasets

    prefix = write_files(tmp_path / "a", documents(10))
    data = settings_for(prefix, split="9998,0.002,0.002", sizes=(8, 8, 8))

    def loop_for_ever(_builder: Any) -> None:
        raise AssertionError("Megatron's builder was asked, which loops for ever")

    monkeypatch.setattr(datasets.LocalBuilder, "build", loop_for_ever)

    with pytest.raises(ConfigurationError, match="the validation split gets 0 of 10 sequences"):
        engine.build_gpt_datasets(data)


def test_data_shorter_than_one_sequence_is_refused_with_both_numbers(tmp_path: Path) -> None:
    data = settings_for(write_files(tmp_path / "a", [[1] * 10, [2] * 6]))

    with pytest.raises(ConfigurationError, match=r"2 sequences with 16 tokens.*_length \+ 1 = 17"):
        engine.build_gpt_datasets(data)


def test_indices_are_built_once_and_again_when_the_data_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    built: list[str] = []
    original = GPTDataset._build_document_sample_shuffle_indices

    def counted(self: Any) -> Any:
        built.append(self.dataset_path)
        return original(self)

    monkeypatch.setattr(GPTDataset, "_build_document_sample_shuffle_indices", counted)
    data = settings_for(write_files(tmp_path / "a", documents(40)))

    first = engine.build_gpt_datasets(data)[0]
    second = engine.build_gpt_datasets(data)[0]
    write_files(tmp_path / "a", documents(40, seed=1))
    changed = engine.build_gpt_datasets(data)[0]

    assert len(built) == 2
    assert first[3]["tokens"].tolist() == second[3]["tokens"].tolist()
    assert (
        len(changed) != len(first) or changed[3]["tokens"].tolist() != first[3]["tokens"].tolist()
    )
    assert not list(tmp_path.rglob("*.pkl"))


def test_documents_are_numbered_with_their_end() -> None:
    numbers = engine.sequence_numbers(torch.tensor([5, 0, 6, 7, 0, 0, 8]), 0)

    assert numbers.tolist() == [0, 0, 1, 1, 1, 2, 3]
