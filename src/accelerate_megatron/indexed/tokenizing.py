"""Text to token ids, in a process that imports neither torch nor transformers where it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from accelerate_megatron.errors import ConfigurationError, DataFileError
from accelerate_megatron.indexed.index import dtype_for

Ids = Sequence[int]


@dataclass(frozen=True)
class TokenizerPlan:
    """How every process makes token ids; it can be pickled.

    Attributes:
        name: What the user called the tokenizer: a folder or a name of the Hub.
        fast: A fast tokenizer as JSON; None: each process loads `name` itself.
        size: Tokens of the tokenizer, those added to it included.
        eod: The token appended to documents, if there is to be one.
        adds_special_tokens: Whether the tokenizer's own special tokens are added.
    """

    name: str
    fast: str | None
    size: int
    eod: int | None
    adds_special_tokens: bool

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """The dtype of the files, by Megatron's rule."""
        return dtype_for(self.size)


def plan_tokenizer(
    name: str, *, append_eod: bool = False, eod_token: str | None = None, special: bool = True
) -> TokenizerPlan:
    """Load the tokenizer once, and return what the other processes need of it.

    Args:
        name: A folder or a name of the Hub, as for `transformers.AutoTokenizer`.
        append_eod: Whether a token is appended to each document.
        eod_token: Which; None: the tokenizer's eos token.
        special: Whether the tokenizer adds its own special tokens.

    Raises:
        ConfigurationError: The tokenizer cannot be loaded, or has no such token.
    """
    try:
        tokenizer = load_tokenizer(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The tokenizer {name!r} cannot be loaded: {error}") from error
    eod = None
    if append_eod:
        word = eod_token or tokenizer.eos_token
        eod = None if word is None else tokenizer.get_vocab().get(word)
        if eod is None:
            raise ConfigurationError(
                f"--append-eod needs a token, but {name!r} has "
                f"{'no eos token' if word is None else f'no token {word!r}'}. Name one with "
                "--eod-token."
            )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    fast = backend.to_str() if backend is not None else None
    return TokenizerPlan(name, fast, len(tokenizer), eod, special)


def load_tokenizer(name: str) -> Any:
    """Return transformers' tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


class Encoder:
    """Makes token ids of texts, many at once."""

    def __init__(self, plan: TokenizerPlan) -> None:
        self.plan = plan
        self._limit = int(np.iinfo(plan.dtype).max)
        self._fast: Any = None
        if plan.fast is not None:
            from tokenizers import Tokenizer

            self._fast = Tokenizer.from_str(plan.fast)
            # As a call of transformers' tokenizer without arguments: nothing cut or padded.
            self._fast.no_truncation()
            self._fast.no_padding()
        else:
            self._slow = load_tokenizer(plan.name)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without the end-of-document token."""
        adds = self.plan.adds_special_tokens
        if self._fast is None:
            return list(self._slow(list(texts), add_special_tokens=adds)["input_ids"])
        encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=adds)
        return [item.ids for item in encoded]

    def as_array(self, sequences: Sequence[Ids]) -> np.ndarray[Any, Any]:
        """Return the ids of all sequences, joined, in the dtype of the files.

        Raises:
            DataFileError: One does not fit.
        """
        count = sum(map(len, sequences))
        array = np.fromiter(chain.from_iterable(sequences), np.int64, count)
        if len(array) and (array.max() > self._limit or array.min() < 0):
            raise DataFileError(
                f"The tokenizer {self.plan.name!r} gave the id {array.max()}, but it says that it "
                f"has {self.plan.size} tokens, for which ids are kept as "
                f"{np.dtype(self.plan.dtype).name}, up to {self._limit}. Use a tokenizer whose ids "
                "are below its length."
            )
        return array.astype(self.plan.dtype)
