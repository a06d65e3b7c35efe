"""The train step of a kind of model, and what the kind asks of batches."""

from __future__ import annotations

from typing import Any

from accelerate_megatron.config.masked_data import Kind
from accelerate_megatron.data.row_labels import RowLabels
from accelerate_megatron.models.encoder import Encoder
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.training.bert import BertTrainStep
from accelerate_megatron.training.gpt import GPTTrainStep
from accelerate_megatron.training.t5 import T5TrainStep
from accelerate_megatron.training.train_step import AbstractTrainStep


def built_in_step(shape: ModelShape) -> type[AbstractTrainStep]:
    """Return the train step of a model for which the plugin names none."""
    if shape.encoder_decoder is not None:
        return T5TrainStep
    return GPTTrainStep if shape.encoder is None else BertTrainStep


def masked_kind(shape: ModelShape) -> Kind | None:
    """Return which masked samples of indexed datasets a model is trained on; None: it reads on."""
    if shape.encoder_decoder is not None:
        return "t5"
    return None if shape.encoder is None else "bert"


def batch_rules(shape: ModelShape) -> dict[str, bool]:
    """Return what the kind of model changes about how batches are joined, for `BatchShape`."""
    encoder = shape.encoder
    return {
        "has_decoder": shape.encoder_decoder is not None,
        "hides_padding": encoder is not None or shape.encoder_decoder is not None,
        "labels_are_per_row": encoder is not None and encoder.head == "classification",
    }


def batch_limits(shape: ModelShape) -> dict[str, Any]:
    """Return what the kind of model changes about what batches may hold, for `BatchLimits`."""
    if shape.encoder_decoder is not None:
        return {
            "has_decoder": True,
            "labels_hint": "for an encoder-decoder model, decoder_input_ids are made of the labels "
            "if the config has a decoder_start_token_id and a pad_token_id, and labels are the "
            "tokens that the decoder is to write, with -100 where a token is not to be learned",
        }
    return {} if shape.encoder is None else _encoder_limits(shape.encoder)


def _encoder_limits(encoder: Encoder) -> dict[str, Any]:
    if encoder.head != "classification":
        return {
            "token_types": encoder.token_types,
            "labels_hint": "labels are the ids of masked tokens and -100 elsewhere, and "
            "next_sentence_label, of a model with that head, is 0 or 1 for each row",
        }
    return {
        "token_types": encoder.token_types,
        "labels_hint": "a classifier's labels are one class, number or row of 0.0 and 1.0 per row",
        "row_labels": RowLabels(num_labels=encoder.num_labels, problem_type=encoder.problem_type),
    }
