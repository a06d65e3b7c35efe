"""Which transformers class a folder's model is: a decoder's, or that of one with an encoder."""

from __future__ import annotations

from typing import Any

import transformers

from accelerate_megatron.models.registry import family_of


def empty_model(config: Any) -> Any:
    """Return the model of `config`; under `init_empty_weights` without values.

    Raises:
        UnsupportedError: There is no family for the config.
    """
    model_class = _class_with_encoder(config)
    if model_class is None:
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model_class(config)


def load_model(folder: str, config: Any, dtype: Any) -> Any:
    """Return transformers' own model of a folder, with its weights."""
    model_class = _class_with_encoder(config) or transformers.AutoModelForCausalLM
    return model_class.from_pretrained(folder, dtype=dtype)


def _class_with_encoder(config: Any) -> Any:
    """Return the class of an encoder with its head, or of an encoder and a decoder; else None."""
    family = family_of(config)
    shape = family.shape(config)
    if shape.encoder is None and shape.encoder_decoder is None:
        return None
    named = [name for name in config.architectures or () if name in family.architectures]
    return getattr(transformers, (named or family.architectures)[0])
