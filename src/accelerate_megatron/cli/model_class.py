"""The model of a folder: of a decoder's class, or that of one with an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from accelerate import init_empty_weights

from accelerate_megatron.models.registry import family_of


def empty_model(folder: str) -> Any:
    """Return the model of a folder's configs, on the meta device.

    Raises:
        UnsupportedError: There is no family for the config.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = _class_with_encoder(config)
    with init_empty_weights():
        if model_class is None:
            model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        else:
            model = model_class(config)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def prepare_checkpoint(accelerator: Any, settings: Mapping[str, Any]) -> Any:
    """Return the model of `settings["checkpoint"]`, prepared and loaded; every rank calls it.

    Args:
        accelerator: The `Accelerator`.
        settings: Also "configs", the folder of its configs, and "tied": whether the checkpoint
            holds no output layer of its own. transformers makes every T5's config say so.
    """
    model = empty_model(settings["configs"])
    said, model.config.tie_word_embeddings = model.config.tie_word_embeddings, settings["tied"]
    prepared = accelerator.prepare(model)
    prepared.config.tie_word_embeddings = said
    accelerator.load_state(settings["checkpoint"])
    return prepared


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
