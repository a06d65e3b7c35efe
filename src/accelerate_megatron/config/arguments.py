"""`other_megatron_args`: each of Megatron's arguments, by name, to where it acts. No torch here.

An argument wins over what the model's config says. One without effect is refused with the
reason, as is one that the script's objects decide; an unknown one is named with the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from accelerate_megatron.config.argument_refusals import REFUSED
from accelerate_megatron.config.argument_table import ARGUMENTS, PLUGIN_FIELDS, Argument, Home
from accelerate_megatron.config.plugin_fields import FIELD, parse_bool
from accelerate_megatron.errors import ConfigurationError, UnknownFieldError, UnsupportedError
from accelerate_megatron.models.shape import ModelShape

DTYPE_WORDS = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8",
}
"""Ways to write a dtype, `str(torch.float32)` without "torch." among them, and Megatron's."""

_FROM_SCRIPT = "other_megatron_args"


@dataclass(frozen=True)
class MegatronArguments:
    """What `other_megatron_args` says, checked and sorted by where it goes."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """The values under the names they were given by."""
    homes: Mapping[Home, Mapping[str, Any]] = field(default_factory=dict)
    """By home, the values under the names of their fields there."""

    def of(self, home: Home) -> Mapping[str, Any]:
        """Return the values of one home, under the names of their fields."""
        return self.homes.get(home, {})


def route_arguments(given: Mapping[str, Any] | None) -> MegatronArguments:
    """Sort `other_megatron_args` by where each argument goes.

    The plugin does it, in its `check`; everything else reads `plugin.routed_arguments`.

    Raises:
        UnknownFieldError: A name is no argument of Megatron's; names the nearest.
        UnsupportedError: An argument is known and cannot be given here; says why.
        ConfigurationError: A value is not of its argument's kind, or two arguments that mean
            one thing differ.
    """
    if given is None:
        return MegatronArguments()
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"{_FROM_SCRIPT} is a {type(given).__name__}; it must be a dictionary of Megatron's "
            "arguments by name."
        )
    _refuse_names(given)
    homes: dict[Home, dict[str, Any]] = {}
    origin: dict[tuple[Home, str], str] = {}
    values = {}
    for name, value in given.items():
        home, target = _place(name)
        values[name] = _converted(name, value)
        first = origin.setdefault((home, target), name)
        if homes.setdefault(home, {}).setdefault(target, values[name]) != values[name]:
            raise ConfigurationError(
                f"{_FROM_SCRIPT} has {first}={given[first]!r} and {name}={value!r}, which mean "
                "one thing. Give one of them."
            )
    return MegatronArguments(values, homes)


def _refuse_names(given: Mapping[str, Any]) -> None:
    unknown = [name for name in given if not _is_known(name)]
    if unknown:
        raise UnknownFieldError(" ".join(_unknown(name) for name in unknown))
    refused = [name for name in given if name in REFUSED]
    if refused:
        raise UnsupportedError(
            " ".join(
                f"{_FROM_SCRIPT} has {name}={given[name]!r}, which is not taken from there: "
                f"{REFUSED[name]}."
                for name in refused
            )
        )


def _is_known(name: str) -> bool:
    return name in ARGUMENTS or name in REFUSED or _plugin_field(name) is not None


def _plugin_field(name: str) -> str | None:
    target = PLUGIN_FIELDS.get(name, name)
    return target if target in FIELD and FIELD[target].kind not in ("object", "ints") else None


def known_names() -> list[str]:
    """Return all of Megatron's arguments that have an answer here, sorted."""
    own = [name for name in FIELD if _plugin_field(name)]
    return sorted({*ARGUMENTS, *REFUSED, *PLUGIN_FIELDS, *own})


def _unknown(name: str) -> str:
    plain = str(name).lstrip("-").replace("-", "_")
    near = difflib.get_close_matches(plain, known_names(), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "docs/plugin.md lists them."
    return f"{_FROM_SCRIPT} has {name!r}, which is no argument of Megatron's here; {hint}"


def _place(name: str) -> tuple[Home, str]:
    argument = ARGUMENTS.get(name)
    if argument is not None:
        return argument.home, argument.field
    target = _plugin_field(name)
    assert target is not None, "_refuse_names comes first"
    return "plugin", target


def _converted(name: str, value: Any) -> Any:
    """Return `value` as the kind of its argument."""
    where = f"{_FROM_SCRIPT}: {name}"
    argument = ARGUMENTS.get(name)
    if argument is None:  # the plugin checks its own fields
        return value
    if argument.kind == "bool":
        return value if isinstance(value, bool) else parse_bool(str(value), where)
    if argument.kind in ("int", "float"):
        return _number(value, argument, where)
    if argument.kind == "strs":
        words = value if isinstance(value, (list, tuple)) else str(value).split(",")
        return tuple(_chosen(word, argument, where) for word in words)
    text = str(value)
    if argument.kind == "dtype":
        word = text.removeprefix("torch.")
        if word not in DTYPE_WORDS:
            raise ConfigurationError(
                f"{where} is {value!r}; it must be one of fp32, bf16, fp16, fp8."
            )
        return DTYPE_WORDS[word]
    return _chosen(text, argument, where)


def _chosen(word: str, argument: Argument, where: str) -> str:
    if argument.choices and word not in argument.choices:
        raise ConfigurationError(
            f"{where} is {word!r}; it must be one of {', '.join(argument.choices)}."
        )
    return word


def _number(value: Any, argument: Argument, where: str) -> float:
    is_whole = argument.kind == "int"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    is_good = not isinstance(value, bool) and isfinite(number)
    is_good = is_good and (not is_whole or number.is_integer())
    if not is_good or (argument.least is not None and number < argument.least):
        wanted = "a whole number" if is_whole else "a number"
        wanted += "" if argument.least is None else f", {argument.least} or more"
        raise ConfigurationError(f"{where} is {value!r}; it must be {wanted}.")
    if not is_whole:
        return number
    return value if isinstance(value, int) else int(number)  # a float has not all of a long one


# --- what has to be on for an argument to have an effect ---------------------------------


@dataclass(frozen=True)
class Context:
    """What the conditions in `NEEDS` look at."""

    plugin: Any
    shape: ModelShape
    precision: str
    has_schedule: bool = True

    @property
    def routed(self) -> MegatronArguments:
        """The arguments themselves, on which some depend."""
        routed: MegatronArguments = self.plugin.routed_arguments
        return routed


def _has_plain_virtual_stages(context: Context) -> bool:
    """Whether chunks are interleaved by `pp_degree` micro-batches, not by larger groups.

    With larger ones and the flushed warm-up, megatron-core 0.16.1 waits for ever on gloo.
    """
    size = context.routed.of("transformer").get("microbatch_group_size_per_vp_stage")
    plugin = context.plugin
    is_interleaved = plugin.num_layers_per_virtual_pipeline_stage is not None
    return is_interleaved and size in (None, plugin.pp_degree)


def _is_selective(context: Context) -> bool:
    plugin = context.plugin
    return plugin.recompute_granularity == "selective" or bool(plugin.recompute_activations)


NEEDS: dict[str, Callable[[Context], bool]] = {
    "full recomputation": lambda c: (
        c.plugin.recompute_granularity == "full"
        and c.plugin.tp_degree > 1
        and not c.plugin.sequence_parallelism
    ),
    "selective recomputation": _is_selective,
    "plain virtual stages": _has_plain_virtual_stages,
    "virtual stages": lambda c: c.plugin.num_layers_per_virtual_pipeline_stage is not None,
    "use_precision_aware_optimizer": lambda c: c.plugin.use_precision_aware_optimizer,
    "optimizer_cpu_offload": lambda c: c.plugin.optimizer_cpu_offload,
    "use_distributed_optimizer": lambda c: c.plugin.use_distributed_optimizer,
    "fp16": lambda c: c.precision == "fp16",
    "overlap_grad_reduce": lambda c: bool(c.routed.of("run").get("overlap_grad_reduce")),
    "overlapped reduction": lambda c: (
        c.plugin.use_distributed_optimizer and bool(c.routed.of("run").get("overlap_grad_reduce"))
    ),
    "overlapped gather": lambda c: bool(c.routed.of("run").get("overlap_param_gather")),
    "a mean of micro-batches": lambda c: not c.plugin.calculate_per_token_loss,
    "rotary positions": lambda c: c.shape.position_embedding == "rope",
    "experts": lambda c: c.shape.experts is not None,
    "context parallelism": lambda c: c.plugin.context_parallel_size > 1,
    "a schedule": lambda c: c.has_schedule,
    "a log": lambda c: bool(c.plugin.tensorboard_dir or c.plugin.set_all_logging_options),
    "WSD": lambda c: c.plugin.lr_decay_style == "WSD",
}
"""Names of conditions, as `Argument.needs` has them."""

ASKED = {
    "full recomputation": "recompute_granularity='full' and tp_degree above 1 without "
    "sequence_parallelism",
    "selective recomputation": "recompute_granularity='selective'",
    "virtual stages": "num_layers_per_virtual_pipeline_stage",
    "plain virtual stages": "num_layers_per_virtual_pipeline_stage, and only without another "
    "microbatch_group_size_per_vp_stage than pp_degree",
    "fp16": "mixed_precision='fp16'",
    "overlapped reduction": "use_distributed_optimizer and overlap_grad_reduce",
    "overlapped gather": "overlap_param_gather",
    "a mean of micro-batches": "calculate_per_token_loss=False",
    "rotary positions": "a model with rotary positions",
    "experts": "a model with experts",
    "context parallelism": "context_parallel_size above 1",
    "a schedule": "a scheduler given to prepare",
    "a log": "tensorboard_dir or set_all_logging_options",
    "WSD": "lr_decay_style='WSD'",
}


def unmet_needs(context: Context) -> list[str]:
    """Return which arguments would have no effect in this run; empty when all have one."""
    problems = []
    for name, value in context.routed.given.items():
        argument = ARGUMENTS.get(name)
        # Switching off what is off anyway says nothing wrong.
        if argument is None or not argument.needs or value is False:
            continue
        if not NEEDS[argument.needs](context):
            problems.append(
                f"{_FROM_SCRIPT} has {name}={value!r}, which has an effect only with "
                f"{ASKED.get(argument.needs, argument.needs)}. Set that, or leave {name} out."
            )
    return problems
