"""`MegatronLMPlugin`: what a training script says about Megatron."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import MegatronLMPlugin as UpstreamPlugin

from accelerate_megatron.config.argument_table import PLUGIN_FIELDS
from accelerate_megatron.config.arguments import MegatronArguments, route_arguments
from accelerate_megatron.config.attention import backend_problem
from accelerate_megatron.config.memory_savers import recompute_setting_problems
from accelerate_megatron.config.plugin_fields import FIELD, FIELDS, PluginField, parse_bool
from accelerate_megatron.config.view import NUM_SPLITS
from accelerate_megatron.errors import ConfigurationError, UnknownFieldError

_ELSEWHERE = {
    **PLUGIN_FIELDS,
    "tensor_parallel_size": "tp_degree",
    "tp_size": "tp_degree",
    "pipeline_parallel_size": "pp_degree",
    "pp_size": "pp_degree",
    "max_grad_norm": "gradient_clipping",
    "precision": "mixed_precision of Accelerator",
    "mixed_precision": "mixed_precision of Accelerator",
    "require_logits": "return_logits",
}
"""Where names that Megatron and other programs use for the same things are found here."""


class MegatronLMPlugin(UpstreamPlugin):  # type: ignore[misc]  # accelerate is untyped
    """Accelerate's plugin for Megatron-LM: its names and signature, with our checks.

    A field that is left out takes its environment variable, `MEGATRON_LM_` and the name
    in capitals, then the model's config where that decides, then its default. Given
    values are checked here; what depends on the number of ranks is checked by
    `Accelerator`, what depends on the model by `prepare`.

    After `Accelerator.prepare`: `micro_batch_size`, `global_batch_size` and
    `data_parallel_size`.

    Raises:
        UnknownFieldError: A keyword is no field; the message names the nearest ones.
        ConfigurationError: A value is not of its field's kind, or contradicts another.
        UnsupportedError: `other_megatron_args` has a name without a place here.
    """

    _given = None  # unknown in a subclass that is a dataclass itself
    set_by_datasets: frozenset[str] = frozenset()
    """Fields that a `MegatronLMDummyDataLoader` has set, not the script."""

    @functools.wraps(UpstreamPlugin.__init__)  # type: ignore[misc]  # the signature is upstream's
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in FIELD]
        if unknown:
            raise UnknownFieldError(" ".join(_unknown(name) for name in unknown))
        given = inspect.signature(UpstreamPlugin.__init__).bind(self, *args, **kwargs).arguments
        self._given = {name for name, value in given.items() if value is not None}
        super().__init__(*args, **kwargs)

    def __post_init__(self) -> None:
        """Resolve and check every field; replaces Accelerate's, which defaults otherwise."""
        for field in FIELDS:
            value = getattr(self, field.name)
            if self._given is None:
                is_given = value != UpstreamPlugin.__dataclass_fields__[field.name].default
            else:
                is_given = field.name in self._given
            setattr(self, field.name, _resolve(field, value, is_given))
        self.megatron_lm_default_args: dict[str, Any] = {}
        self.check()

    def check(self) -> None:
        """Check the fields as they are now; `prepare` calls it again for later changes.

        Sets `routed_arguments`: `other_megatron_args`, checked and sorted by where they go.

        Raises:
            ConfigurationError: See the class.
            UnsupportedError: An argument is known, but has no place here.
        """
        self.routed_arguments = route_arguments(self.other_megatron_args)
        self._take_arguments(self.routed_arguments)
        values = {field.name: getattr(self, field.name) for field in FIELDS}
        problems = _problems(values)
        if problems:
            raise ConfigurationError.of(problems)

    def _take_arguments(self, arguments: MegatronArguments) -> None:
        """Set the fields that `other_megatron_args` names; one that is set otherwise is refused."""
        for name, value in arguments.of("plugin").items():
            field = FIELD[name]
            wanted = _converted(field, value)
            current = getattr(self, name)
            if current not in (field.default, wanted):
                raise ConfigurationError(
                    f"MegatronLMPlugin.{name} is {current!r}, and other_megatron_args says "
                    f"{value!r} for the same thing. Give one of them."
                )
            setattr(self, name, wanted)

    def __getattr__(self, name: str) -> Any:
        """Say what is missing when a size is read before it is known."""
        if name in ("micro_batch_size", "global_batch_size", "data_parallel_size"):
            raise AttributeError(
                f"MegatronLMPlugin.{name} is known after accelerator.prepare(...), which sees "
                "the DataLoader's batch size and the number of ranks; read it after that call."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _resolve(field: PluginField, value: Any, is_given: bool) -> Any:
    """Return the field's value: as given, else from the environment, else its default."""
    word = os.environ.get(field.variable)
    if word is not None and not is_given:
        value = field.parse(word, field.variable)
    return field.default if value is None else _converted(field, value)


def _converted(field: PluginField, value: Any) -> Any:
    """Return `value` as the field's kind, or refuse it."""
    name = f"MegatronLMPlugin.{field.name}"
    if field.name == "attention_backend":
        return value
    if field.kind == "ints":
        return _sample_counts(value, name)
    if field.kind == "object":
        return _checked_object(field, value, name)
    if field.kind == "bool":
        return value if isinstance(value, bool) else parse_bool(str(value), name)
    if field.kind in ("int", "float"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (field.kind == "int" and value != int(value)):
            wanted = "a whole number" if field.kind == "int" else "a number"
            raise ConfigurationError(f"{name} is {value!r}; it must be {wanted}.")
        return int(value) if field.kind == "int" else float(value)
    if field.choices and value not in field.choices:
        raise ConfigurationError(
            f"{name} is {value!r}; it must be one of {', '.join(field.choices)}."
        )
    return value


def _sample_counts(value: Any, name: str) -> list[int]:
    """Return a copy of `value` as whole numbers, one for each of at most three DataLoaders."""
    numbers: list[Any] = list(value) if isinstance(value, (list, tuple)) else [None]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not whole or not 1 <= len(numbers) <= NUM_SPLITS:
        raise ConfigurationError(
            f"{name} is {value!r}; it must be a list of 1 to {NUM_SPLITS} whole numbers: the "
            "samples already used of the train, validation and test DataLoader, in the order in "
            "which prepare gets them."
        )
    return numbers


def _checked_object(field: PluginField, value: Any, name: str) -> Any:
    """Return `value` if it is what the field holds: a dictionary, a class or a function."""
    if field.name in ("custom_train_step_kwargs", "other_megatron_args"):
        is_right, wanted = isinstance(value, Mapping), "a dictionary"
    elif field.name == "custom_train_step_class":
        is_right, wanted = isinstance(value, type), "a class"
    else:
        is_right, wanted = callable(value), "a function"
    if not is_right:
        raise ConfigurationError(f"{name} is {value!r}; it must be {wanted}: {field.help}.")
    return value


def _problems(values: dict[str, Any]) -> list[str]:
    """Return what is wrong with the values and with their combinations."""
    problems = [
        f"MegatronLMPlugin.{name} is {values[name]}; it must be at least {least}."
        for name, least in (
            ("num_micro_batches", 1),
            ("gradient_clipping", 0),
            ("min_lr", 0),
            ("train_iters", 1),
            ("train_samples", 1),
            ("lr_warmup_iters", 0),
            ("lr_warmup_samples", 0),
            ("lr_decay_iters", 1),
            ("lr_decay_samples", 1),
            ("seq_length", 1),
            ("encoder_seq_length", 1),
            ("decoder_seq_length", 1),
            ("eval_iters", 0),
            ("eval_interval", 1),
        )
        if values[name] is not None and values[name] < least
    ]
    for name in ("attention_dropout", "hidden_dropout", "lr_warmup_fraction"):
        if values[name] is not None and not 0 <= values[name] <= 1:
            problems.append(f"MegatronLMPlugin.{name} is {values[name]}; it must be in [0, 1].")
    for names in (
        ("train_iters", "train_samples"),
        ("lr_decay_iters", "lr_decay_samples"),
        ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    ):
        given = [f"{name}={values[name]}" for name in names if values[name] is not None]
        if len(given) > 1:
            problems.append(
                f"MegatronLMPlugin got {' and '.join(given)}; at most one of "
                f"{', '.join(names)} can be given."
            )
    return problems + _combination_problems(values)


def _combination_problems(values: dict[str, Any]) -> list[str]:
    """Return which settings would have no effect, or lack another one."""
    backend = backend_problem(values["attention_backend"])
    problems = [backend] if backend else []
    problems += recompute_setting_problems(values)
    style = values["weight_decay_incr_style"]
    start, end = values["start_weight_decay"], values["end_weight_decay"]
    if style == "constant":
        problems += [
            f"MegatronLMPlugin.{name} is {value}, but weight_decay_incr_style is 'constant', with "
            "which the weight decay is the optimizer's. Set weight_decay_incr_style to 'linear' "
            f"or 'cosine', or leave {name} out."
            for name, value in (("start_weight_decay", start), ("end_weight_decay", end))
            if value is not None
        ]
    elif start is None or end is None or not 0 <= start <= end:
        problems.append(
            f"MegatronLMPlugin.weight_decay_incr_style is {style!r}, and start_weight_decay="
            f"{start}, end_weight_decay={end}; it needs both, with 0 <= start <= end."
        )
    scales, factor = values["scale_lr_cond"] is not None, values["lr_mult"]
    if scales != (factor != 1.0):
        problems.append(
            f"MegatronLMPlugin.lr_mult is {factor:g} {'with' if scales else 'without'} "
            "scale_lr_cond: the rate of the parameters for which scale_lr_cond(name, parameter) "
            "is true is multiplied by lr_mult. Give both, or neither."
        )
    elif factor <= 0:
        problems.append(f"MegatronLMPlugin.lr_mult is {factor:g}; it must be above 0.")
    if values["custom_prepare_model_function"] and not values["custom_model_provider_function"]:
        problems.append(
            "MegatronLMPlugin.custom_prepare_model_function is given without "
            "custom_model_provider_function, which it is called with. Give both."
        )
    if values["custom_train_step_kwargs"] and values["custom_train_step_class"] is None:
        problems.append(
            "MegatronLMPlugin.custom_train_step_kwargs is given without custom_train_step_class, "
            "whose keyword arguments they are. Give the class, or leave them out."
        )
    return problems


def _unknown(name: str) -> str:
    if name in _ELSEWHERE:
        return f"MegatronLMPlugin has no field {name!r}: it is {_ELSEWHERE[name]}."
    near = difflib.get_close_matches(name, FIELD, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "docs/plugin.md lists the fields."
    return f"MegatronLMPlugin has no field {name!r}; {hint}"
