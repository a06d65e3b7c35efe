"""Whether the output layer is the word embedding: the config says so, and the tensors decide."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.choosing import folder_of, folder_source
from accelerate_megatron.weights.source import is_on_meta

_COMPARED_ROWS = 64


def as_tied_in(
    model: nn.Module,
    family: Family,
    shape: ModelShape,
    weights: str | os.PathLike[str] | None = None,
) -> ModelShape:
    """Return `shape`, tied if the output layer of the model is its word embedding.

    A config that is changed on a model in memory ties and unties nothing, so what it says has to
    be true of the tensors. Not of T5's: transformers makes each of those say that the output
    layer is tied, and unties the one of a folder that holds other weights for it.

    Args:
        model: The Hugging Face model.
        family: Its family.
        shape: What its config says.
        weights: The folder that `prepare` was given.

    Raises:
        ConfigurationError: The config says otherwise than the tensors in memory.
        UnsupportedError: Encoder and decoder have word embeddings of their own.
        WeightsError: The folder cannot be read.
    """
    if is_on_meta(model):
        return _as_tied_in_folder(folder_of(model, weights), family, shape)
    hf_model: Any = model
    if shape.encoder_decoder is not None:
        _check_stacks_share(hf_model)
    embedding, head = hf_model.get_input_embeddings(), hf_model.get_output_embeddings()
    if head is None:
        return shape
    is_tied = head.weight is embedding.weight
    if is_tied and not shape.tied_embeddings:
        raise ConfigurationError(_one_tensor(hf_model, _names(hf_model, head, embedding)))
    if shape.tied_embeddings and not is_tied and shape.encoder_decoder is None:
        raise ConfigurationError(
            _two_tensors(hf_model, _names(hf_model, head, embedding), is_decoder=not shape.encoder)
        )
    return replace(shape, tied_embeddings=is_tied)


def _as_tied_in_folder(folder: Path | None, family: Family, shape: ModelShape) -> ModelShape:
    """Return `shape`, untied if the folder holds other weights for a T5's output layer."""
    if folder is None or shape.encoder_decoder is None or not shape.tied_embeddings:
        return shape
    source = folder_source(folder, family, shape)
    heads, rows = source.copies.keys() - family.disk_copies.keys(), (slice(_COMPARED_ROWS),)
    # A few rows tell tied from untied; `check_copies` compares all rows of a tied one.
    is_tied = all(
        torch.equal(source.read(head, rows), source.read(source.copies[head], rows))
        for head in heads
    )
    return replace(shape, tied_embeddings=is_tied)


def _one_tensor(model: Any, names: tuple[str, str]) -> str:
    head, embedding = names
    return (
        f"The config of the {type(model).__name__} says tie_word_embeddings=False, but {head} and "
        f"{embedding} are one tensor: set on a model that is made, it unties nothing. Before the "
        f"optimizer is made, give the model another one, model.{head} = "
        f"torch.nn.Parameter(model.{head}.detach().clone()), or set it to True again."
    )


def _two_tensors(model: Any, names: tuple[str, str], *, is_decoder: bool) -> str:
    head, embedding = names
    train_both = "set it to False to train both, or " if is_decoder else ""
    return (
        f"The config of the {type(model).__name__} says tie_word_embeddings=True, but {head} and "
        f"{embedding} are two tensors. Before the optimizer is made, {train_both}call "
        "model.tie_weights() to train one."
    )


def _check_stacks_share(model: Any) -> None:
    shared = model.get_input_embeddings().weight
    if all(stack.embed_tokens.weight is shared for stack in (model.encoder, model.decoder)):
        return
    name = type(model.config).__name__
    raise UnsupportedError(
        f"The encoder and decoder of the {type(model).__name__} do not share one word "
        f"embedding: encoder.embed_tokens or decoder.embed_tokens is another than shared. "
        f"transformers builds it so where tie_word_embeddings of a {name} is set to False "
        f"after it was made (it is {model.config.tie_word_embeddings}). Pass it to {name} "
        "instead, or set model.encoder.embed_tokens = model.decoder.embed_tokens = "
        "model.shared before the optimizer is made; an output layer of its own stays."
    )


def _names(model: nn.Module, head: nn.Module, embedding: nn.Module) -> tuple[str, str]:
    names = {id(module): name for name, module in model.named_modules()}
    return f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight"
