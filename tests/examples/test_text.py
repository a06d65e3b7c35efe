"""The examples' text: cut by file, encoded without loss, cached."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def text(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "text", raising=False)
    import text

    return text


@pytest.fixture
def few_files(text, monkeypatch):
    train, validation = text.standard_library_files()
    monkeypatch.setattr(text, "standard_library_files", lambda: (train[:8], validation[:2]))
    return train[:8], validation[:2]


def test_train_and_validation_share_no_file_and_hold_no_tests(text):
    train, validation = text.standard_library_files()

    assert not set(train) & set(validation)
    assert 15 < len(train) / len(validation) < 25
    assert not [path for path in train + validation if "test" in path.parts]


def test_the_tokens_give_the_files_back(text, few_files, tmp_path):
    tokenizer, train_tokens, eval_tokens = text.load_text(tmp_path, vocab_size=512)

    train, validation = few_files
    for tokens, files in ((train_tokens, train), (eval_tokens, validation)):
        pieces = tokenizer.decode(tokens).split(text.END_OF_TEXT)
        assert pieces == [*(path.read_text() for path in files), ""]
    assert len(tokenizer) == 512
    assert train_tokens.max() < 512


def test_the_tokenizer_is_trained_once(text, few_files, tmp_path, monkeypatch):
    first = text.load_text(tmp_path, vocab_size=512)
    monkeypatch.setattr(text, "_train_tokenizer", None)

    again = text.load_text(tmp_path, vocab_size=512)

    assert np.array_equal(again[1], first[1])
    assert again[0].eos_token_id == first[0].eos_token_id


def test_windows_are_consecutive_and_labels_are_the_inputs(text):
    windows = text.Windows(np.arange(11, dtype=np.uint16), 4)

    samples = [windows[index] for index in range(len(windows))]

    assert [sample["input_ids"].tolist() for sample in samples] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(sample["labels"].equal(sample["input_ids"]) for sample in samples)


def test_spread_takes_windows_from_end_to_end(text):
    windows = text.Windows(np.arange(40, dtype=np.uint16), 4)

    assert [int(sample["input_ids"][0]) for sample in windows.spread(5)] == [0, 8, 16, 24, 32]
    assert len(windows.spread(99)) == 10
