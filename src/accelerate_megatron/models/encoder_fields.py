"""What the configs of BERT and Megatron's BERT say, translated once. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from accelerate_megatron.models.encoder import Encoder, Head, ProblemType
from accelerate_megatron.models.hf_config import (
    activation,
    activation_problems,
    common_problems,
    field,
    refuse,
    required,
    switch_problems,
)
from accelerate_megatron.models.shape import ModelShape


def encoder_shape(
    config: Any, *, model_type: str, heads: Mapping[str, Head], norm_after: bool
) -> ModelShape:
    """Translate a config of an encoder with the head of the class that it names.

    Args:
        config: A `BertConfig` or `MegatronBertConfig`. A config that names no class is that of a
            masked language model.
        model_type: Its model type.
        heads: The head of each class.
        norm_after: See `Encoder`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing, or the sizes contradict each other.
    """
    architectures = getattr(config, "architectures", None) or ()
    named = [heads[name] for name in architectures if name in heads]
    head: Head = named[0] if named else "masked_lm"
    refuse(_problems(config, head))
    hidden_size = required(config, "hidden_size")
    num_heads = required(config, "num_attention_heads")
    encoder = Encoder(
        token_types=required(config, "type_vocab_size"),
        norm_after=norm_after,
        head=head,
        num_labels=required(config, "num_labels"),
        problem_type=field(config, "problem_type"),
        classifier_dropout=getattr(config, "classifier_dropout", None),
    )
    return ModelShape(
        model_type=model_type,
        num_layers=required(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=required(config, "intermediate_size"),
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        kv_channels=hidden_size // num_heads,
        vocab_size=required(config, "vocab_size"),
        max_positions=required(config, "max_position_embeddings"),
        normalization="LayerNorm",
        norm_epsilon=required(config, "layer_norm_eps"),
        activation=activation(config, "hidden_act"),
        gated_mlp=False,
        linear_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        position_embedding="learned_absolute",
        tied_embeddings=encoder.has_vocabulary_head,
        embedding_dropout=required(config, "hidden_dropout_prob"),
        hidden_dropout=required(config, "hidden_dropout_prob"),
        attention_dropout=required(config, "attention_probs_dropout_prob"),
        initializer_range=required(config, "initializer_range"),
        encoder=encoder,
    )


def _problems(config: Any, head: Head) -> list[str]:
    owner = type(config).__name__
    problems = [*common_problems(config), *activation_problems(config, "hidden_act")]
    for name in ("is_decoder", "add_cross_attention"):
        reason = "a BERT is trained as an encoder only; set it to False."
        problems += switch_problems(config, name, reason=reason)
    positions = getattr(config, "position_embedding_type", None)
    if positions not in (None, "absolute"):
        problems.append(
            f"{owner}.position_embedding_type is {positions!r}; supported is 'absolute'."
        )
    if head in ("masked_lm", "pretraining") and not required(config, "tie_word_embeddings"):
        problems.append(
            f"{owner}.tie_word_embeddings is False: a BERT's output layer is its word embedding "
            "here; set it to True, and call model.tie_weights() on a model that is already made."
        )
    hidden_size = required(config, "hidden_size")
    num_heads = required(config, "num_attention_heads")
    if hidden_size % num_heads:
        problems.append(
            f"{owner}.hidden_size is {hidden_size} and num_attention_heads is {num_heads}: "
            "hidden_size must be a multiple of num_attention_heads."
        )
    if required(config, "type_vocab_size") < 1:
        problems.append(f"{owner}.type_vocab_size is 0; it must be at least 1.")
    if head == "classification":
        problems += _classifier_problems(config)
    return problems


def _classifier_problems(config: Any) -> list[str]:
    owner = type(config).__name__
    num_labels, problem_type = required(config, "num_labels"), field(config, "problem_type")
    if problem_type not in get_args(ProblemType):
        known = ", ".join(repr(name) for name in get_args(ProblemType) if name)
        return [f"{owner}.problem_type is {problem_type!r}; it must be one of {known}, or None."]
    if num_labels < 1:
        return [f"{owner}.num_labels is {num_labels}; it must be at least 1."]
    return []
