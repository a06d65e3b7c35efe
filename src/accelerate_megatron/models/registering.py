"""`add_model_config_to_megatron_parser`: a user's own model family. No torch here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.registry import FAMILIES
from accelerate_megatron.models.shape import ModelShape

ShapeFunction = Callable[[Any], ModelShape]
Table = Callable[[ModelShape], Mapping[str, Parameter]]


def add_model_config_to_megatron_parser(
    model_type: str,
    *,
    architectures: Sequence[str],
    parameters: Table | None = None,
    like: str | None = None,
) -> Callable[[ShapeFunction], ShapeFunction]:
    """Register the decorated function as the translation of a model's config.

    The function takes the Hugging Face config and returns a `ModelShape`, as `llama_shape` does.

    Args:
        model_type: `config.model_type` of the models.
        architectures: Names of their classes.
        parameters: The table of their parameters; see docs/adding-a-model.md.
        like: A family of this package with the same names of parameters, instead of a table.

    Raises:
        ConfigurationError: The model type is taken, or there is not exactly one of
            `parameters` and `like`, or `like` is no family.
        UnsupportedError: The decorated function is one for Accelerate's own integration, which
            fills Megatron's arguments and cannot say where weights go.
    """
    family = _family(model_type, tuple(architectures), parameters, like)

    def register(shape: ShapeFunction) -> ShapeFunction:
        if len(inspect.signature(shape).parameters) != 1:
            raise UnsupportedError(
                f"{getattr(shape, '__name__', shape)} does not take exactly the config. "
                "Accelerate's parsers take (megatron_lm_plugin, model, batch_data) and fill "
                "Megatron's arguments; here a function takes the config and returns a ModelShape "
                "(see docs/adding-a-model.md)."
            )
        FAMILIES[model_type] = replace(family, shape=shape)
        return shape

    return register


def _family(
    model_type: str, architectures: tuple[str, ...], parameters: Table | None, like: str | None
) -> Family:
    if model_type in FAMILIES:
        raise ConfigurationError(
            f"There is a family for model_type {model_type!r} already; give yours another "
            "model_type."
        )
    if (parameters is None) == (like is None):
        raise ConfigurationError(
            f"The family of {model_type!r} needs either parameters, its table, or like, a family "
            "with the same table; give one of them."
        )
    if parameters is not None:
        return Family(
            model_type=model_type,
            architectures=architectures,
            shape=_no_shape,
            parameters=parameters,
        )
    if like not in FAMILIES:
        raise ConfigurationError(
            f"like is {like!r}; it must be one of {', '.join(sorted(FAMILIES))}."
        )
    return replace(FAMILIES[like], model_type=model_type, architectures=architectures)


def _no_shape(config: Any) -> ModelShape:
    """Hold the place of the decorated function until there is one."""
    raise ConfigurationError(f"No function translates a {type(config).__name__} yet.")
