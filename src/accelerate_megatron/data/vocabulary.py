"""The vocabulary of a tokenizer's folder, as masked samples need it."""

from __future__ import annotations

import re

from accelerate_megatron.config.masked_data import MaskedData, Vocabulary
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.indexed.tokenizing import load_tokenizer

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_NEEDED = {"bert": ("cls", "sep", "mask", "pad"), "t5": ("eos", "pad")}


def read_vocabulary(masked: MaskedData) -> Vocabulary:
    """Return the vocabulary of `masked.tokenizer`. Communicates with nobody.

    Raises:
        ConfigurationError: There is no tokenizer, or it lacks a token that samples need.
    """
    try:
        tokenizer = load_tokenizer(masked.tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"tokenizer_model is {masked.tokenizer!r}, of which no tokenizer could be loaded "
            f"({str(error).splitlines()[0]}). Give the folder that the files were built with."
        ) from error
    special = {
        name: getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "cls", "sep", "mask", "eos")
    }
    by_id = {number: word for word, number in tokenizer.get_vocab().items()}
    numbered = {
        int(found[1]): number for number, word in by_id.items() if (found := _SENTINEL.match(word))
    }
    sentinels = tuple(numbered[place] for place in sorted(numbered))
    missing = [f"{name}_token" for name in _NEEDED[masked.kind] if special[name] is None]
    if masked.kind == "t5" and not sentinels:
        missing.append("<extra_id_0> and so on")
    if missing:
        raise ConfigurationError(
            f"The tokenizer {masked.tokenizer} has no {', '.join(missing)}, which the samples of "
            f"a {masked.kind} model are made with. Add them to the tokenizer, or take another."
        )
    words = tuple(by_id.get(number, "") for number in range(max(by_id) + 1))
    return Vocabulary(words=words, sentinels=sentinels, **special)
