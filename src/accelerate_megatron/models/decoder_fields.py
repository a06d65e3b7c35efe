"""Heads and sliding windows as the configs of decoder-only models describe them. No torch."""

from __future__ import annotations

from typing import Any

from accelerate_megatron.models.hf_config import (
    activation,
    activation_problems,
    common_problems,
    required,
)
from accelerate_megatron.models.rotary import rope_of, rope_problems

FULL, SLIDING = "full_attention", "sliding_attention"
"""The words of `config.layer_types` that the engine has an attention for."""


def decoder_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a `ModelShape` that all these configs name alike.

    What is left to the family: its model type, norm, MLP, biases and dropout, and anything
    that not every family has.
    """
    return {
        "num_layers": required(config, "num_hidden_layers"),
        "hidden_size": required(config, "hidden_size"),
        "ffn_hidden_size": required(config, "intermediate_size"),
        "num_attention_heads": required(config, "num_attention_heads"),
        "num_query_groups": required(config, "num_key_value_heads"),
        "kv_channels": head_dim_of(config),
        "vocab_size": required(config, "vocab_size"),
        "max_positions": required(config, "max_position_embeddings"),
        "activation": activation(config, "hidden_act"),
        "position_embedding": "rope",
        "rope_parameters": rope_of(config),
        "tied_embeddings": required(config, "tie_word_embeddings"),
        "attention_dropout": required(config, "attention_dropout"),
        "initializer_range": required(config, "initializer_range"),
    }


def decoder_problems(
    config: Any, *, partial_rotary: bool = False, more_rope_types: tuple[str, ...] = ()
) -> list[str]:
    """Say what the engine cannot represent of those fields; empty when it can all.

    Args:
        config: A Hugging Face config.
        partial_rotary: Whether models of this type read `partial_rotary_factor`.
        more_rope_types: Of rotary positions, besides those that all models may have.
    """
    return [
        *common_problems(config),
        *activation_problems(config, "hidden_act"),
        *head_problems(config),
        *rope_problems(
            config, head_dim_of(config), partial=partial_rotary, more_types=more_rope_types
        ),
    ]


def head_dim_of(config: Any) -> int:
    """Return the channels of one head: `head_dim` where the config sets it apart."""
    # Not all config classes have the field, and transformers' models read it like this.
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        return int(head_dim)
    return int(required(config, "hidden_size") // required(config, "num_attention_heads"))


def head_problems(config: Any) -> list[str]:
    """Say whether query heads share key/value heads unevenly; empty when they do not."""
    name = type(config).__name__
    num_heads = required(config, "num_attention_heads")
    num_groups = required(config, "num_key_value_heads")
    if num_heads % num_groups == 0:
        return []
    return [
        f"{name}.num_attention_heads is {num_heads} and num_key_value_heads is {num_groups}: "
        "the heads must be a multiple of the key/value heads."
    ]


def one_window(config: Any) -> tuple[int | None, ...]:
    """Return the windows of a model whose `sliding_window`, if set, holds in all layers."""
    window = config.sliding_window
    return () if window is None else (int(window),) * required(config, "num_hidden_layers")


def windows_by_layer(config: Any) -> tuple[int | None, ...]:
    """Return the windows of a model whose `layer_types` say which layers have one."""
    types = required(config, "layer_types")
    if SLIDING not in types:
        return ()
    return tuple(int(config.sliding_window) if kind == SLIDING else None for kind in types)


def window_problems(config: Any) -> list[str]:
    """Say what is wrong with `sliding_window` and `layer_types`; empty when nothing is."""
    name = type(config).__name__
    window = config.sliding_window
    problems = []
    if window is not None and window < 1:
        problems.append(f"{name}.sliding_window is {window}; it must be at least 1, or None.")
    types = getattr(config, "layer_types", None)
    if types is None:
        return problems
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        problems.append(
            f"{name}.layer_types has {', '.join(unknown)}; supported are {FULL} and {SLIDING}."
        )
    if len(types) != required(config, "num_hidden_layers"):
        problems.append(
            f"{name}.layer_types names {len(types)} layers and num_hidden_layers is "
            f"{config.num_hidden_layers}; name each layer."
        )
    if SLIDING in types and window is None:
        problems.append(
            f"{name}.layer_types has {SLIDING}, but sliding_window is None; set sliding_window."
        )
    return problems
