"""Real text for the examples, from nothing but the running Python: its standard library's sources.

Cut by file into train and validation, so that no validation line was seen in training, and
encoded with a byte-level BPE tokenizer trained on the train files. Both are cached in a folder.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Tests repeat the library line by line, and the codec tables are numbers.
_LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_EVERY_NTH_FILE_VALIDATES = 20


class Windows(Dataset[dict[str, torch.Tensor]]):
    """A stream of tokens cut into windows of one length; labels are the inputs, as for a GPT."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        count = len(tokens) // length
        self.rows = torch.from_numpy(tokens[: count * length].reshape(count, length).astype(int))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}

    def spread(self, count: int) -> Subset[dict[str, torch.Tensor]]:
        """Return `count` of the windows, evenly spaced; all of them when there are fewer."""
        stride = max(1, len(self) // count)
        return Subset(self, range(0, len(self), stride)[:count])


def standard_library_files() -> tuple[list[Path], list[Path]]:
    """Return the sources of the standard library, cut into train and validation files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(root).parts) and path.stat().st_size > 0
    ]
    validation = files[::_EVERY_NTH_FILE_VALIDATES]
    return [path for path in files if path not in set(validation)], validation


def load_text(
    cache: Path, *, vocab_size: int
) -> tuple[PreTrainedTokenizerFast, np.ndarray, np.ndarray]:
    """Return the tokenizer and the tokens of train and validation, made once per Python version.

    Call it under `accelerator.main_process_first()`: the first process writes the cache.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    folder = cache / f"python-{version}-{vocab_size}"
    if not (folder / "validation.npy").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        train_files, validation_files = standard_library_files()
        tokenizer = _train_tokenizer(train_files, vocab_size)
        tokenizer.save(str(folder / "bpe.json"))
        np.save(folder / "train.npy", _encode(tokenizer, train_files))
        np.save(folder / "validation.npy", _encode(tokenizer, validation_files))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "bpe.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    return tokenizer, np.load(folder / "train.npy"), np.load(folder / "validation.npy")


def _train_tokenizer(files: list[Path], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_read, files), trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, files: list[Path]) -> np.ndarray:
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokens: list[int] = []
    for encoding in tokenizer.encode_batch([_read(path) for path in files]):
        tokens += [*encoding.ids, end]
    return np.array(tokens, dtype=np.uint16)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
