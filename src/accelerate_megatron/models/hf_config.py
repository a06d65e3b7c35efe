"""Reading a Hugging Face config: a field is there or it is an error, never a guess. No torch.

Configs are duck-typed, so that nothing here imports transformers (which imports torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.shape import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's names of activations. Three of them round the same function differently.

Source: transformers 5.24, activations.py, ACT2FN.
"""


def field(config: Any, name: str) -> Any:
    """Return `config.name`, which may be None.

    Raises:
        ConfigurationError: The config has no such field.
    """
    try:
        return getattr(config, name)
    except AttributeError as error:
        raise ConfigurationError(
            f"{_named(config, name)} is missing; a model of type {config.model_type!r} needs it. "
            "Build the config with transformers' own class for this model type (transformers 5)."
        ) from error


def required(config: Any, name: str) -> Any:
    """Return `config.name`, which must be set.

    Raises:
        ConfigurationError: The config has no such field, or it is None.
    """
    value = field(config, name)
    if value is None:
        raise ConfigurationError(f"{_named(config, name)} is None; it must be set.")
    return value


def activation(config: Any, name: str) -> Activation:
    """Return the activation that `config.name` stands for; `activation_problems` comes first."""
    return ACTIVATIONS[required(config, name)]


def activation_problems(config: Any, name: str) -> list[str]:
    """Say whether `config.name` is an activation that the engine lacks; empty when it has it."""
    value = required(config, name)
    if value in ACTIVATIONS:
        return []
    return [f"{_named(config, name)} is {value!r}; supported are {', '.join(sorted(ACTIVATIONS))}."]


def switch_problems(config: Any, name: str, *, reason: str) -> list[str]:
    """Refuse a switch that is on; `reason` completes "... is True: "."""
    value = required(config, name)
    return [f"{_named(config, name)} is {value!r}: {reason}"] if value else []


def common_problems(config: Any) -> list[str]:
    """What no decoder-only family of this package can represent; empty when there is nothing."""
    problems = switch_problems(
        config,
        "is_encoder_decoder",
        reason="only decoder-only models are supported; set it to False.",
    )
    return problems + quantization_problems(config)


def quantization_problems(config: Any) -> list[str]:
    """Refuse a quantised model."""
    # transformers sets this field only on quantised models; all others lack it.
    if getattr(config, "quantization_config", None) is None:
        return []
    return [
        f"{_named(config, 'quantization_config')} is set: quantised weights cannot be "
        "trained here; load the model without quantisation, or dequantise it first."
    ]


def refuse(problems: Sequence[str]) -> None:
    """Raise one `UnsupportedError` that lists `problems`, if there are any."""
    if problems:
        raise UnsupportedError.of(problems)


def _named(config: Any, name: str) -> str:
    return f"{type(config).__name__}.{name}"
