"""From the plugin's and the dummy scheduler's numbers to one schedule. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from accelerate_megatron.config.run import ScheduleSettings
from accelerate_megatron.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ScheduleSources:
    """What a schedule is made of besides the plugin.

    The dummy's two numbers count batches of the DataLoader before `prepare`, as for every
    scheduler given to Accelerate; the plugin's count updates (or samples) and win.

    Attributes:
        total_batches: The dummy's `total_num_steps`.
        warmup_batches: The dummy's `warmup_num_steps`.
        loader_length: Batches of one epoch of the train DataLoader before `prepare`, if known.
        updates_per_epoch: Updates that one epoch of it becomes, a short last one included.
        batches_per_update: Batches of it, before `prepare`, that one update takes.
        global_batch_size: Samples of one update; None without a DataLoader.
        weight_decays: Those of the optimizer's groups.
        arguments: What `other_megatron_args` says about the schedule, by field.
    """

    total_batches: int | None = None
    warmup_batches: int = 0
    loader_length: int | None = None
    updates_per_epoch: int | None = None
    batches_per_update: Fraction = Fraction(1)
    global_batch_size: int | None = None
    weight_decays: Sequence[float] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Counted:
    """A schedule's lengths, in one unit."""

    unit: str
    total: int | None
    """Of the whole training; None when only the decay has a length."""
    decay: int
    warmup: float
    wsd_decay: int | None
    steps_per_update: int


def resolve_schedule(plugin: Any, sources: ScheduleSources) -> ScheduleSettings:
    """Return the schedule that the plugin and a `MegatronLMDummyScheduler` ask for together.

    Raises:
        ConfigurationError: Nothing says how long the training is, warm-up outlasts it, or the
            weight decay's settings contradict each other.
    """
    in_samples = plugin.train_samples is not None or plugin.lr_decay_samples is not None
    counted = (_in_samples if in_samples else _in_updates)(plugin, sources)
    style = sources.arguments.get("wsd_decay_style", "exponential")
    _check_lengths(plugin, counted)
    start, end = _weight_decay(plugin, sources.weight_decays, counted)
    return ScheduleSettings(
        decay_steps=counted.decay,
        warmup_steps=counted.warmup,
        steps_per_update=counted.steps_per_update,
        decay_style=plugin.lr_decay_style,
        min_lr=plugin.min_lr,
        init_lr=sources.arguments.get("init_lr", 0.0),
        wsd_decay_steps=counted.wsd_decay,
        wsd_decay_style=style if plugin.lr_decay_style == "WSD" else None,
        weight_decay_style=plugin.weight_decay_incr_style,
        start_weight_decay=start,
        end_weight_decay=end,
        total_steps=counted.total,
    )


def total_updates(plugin: Any, sources: ScheduleSources) -> int | None:
    """Return the updates that the dummy's `total_num_steps` means; None when it is not used."""
    total = sources.total_batches
    if plugin.train_iters is not None or plugin.train_samples is not None or total is None:
        return None
    # Whole epochs end with an update of their own, which may be short.
    length, per_epoch = sources.loader_length, sources.updates_per_epoch
    if length and per_epoch and total % length == 0:
        return total // length * per_epoch
    return math.ceil(total / sources.batches_per_update)


def _in_updates(plugin: Any, sources: ScheduleSources) -> _Counted:
    total = plugin.train_iters or total_updates(plugin, sources)
    decay = plugin.lr_decay_iters if plugin.lr_decay_iters is not None else total
    if decay is None:
        raise ConfigurationError(
            "The learning-rate schedule has no length: give total_num_steps to "
            "MegatronLMDummyScheduler, or train_iters or train_samples to MegatronLMPlugin."
        )
    if plugin.lr_warmup_samples is not None:
        raise ConfigurationError(
            f"lr_warmup_samples={plugin.lr_warmup_samples} counts samples, but the training is "
            f"counted in updates ({decay}). Give lr_warmup_iters, or train_samples."
        )
    warmup = plugin.lr_warmup_iters
    if warmup is None and plugin.lr_warmup_fraction is not None:
        warmup = plugin.lr_warmup_fraction * decay
    if warmup is None:
        warmup = _warmup_updates(sources)
    wsd_decay = _wsd_decay(plugin, sources, "iters")
    return _Counted("updates", total, decay, warmup, wsd_decay, steps_per_update=1)


def _warmup_updates(sources: ScheduleSources) -> int:
    """Return the updates that the dummy's `warmup_num_steps` means."""
    return math.ceil(sources.warmup_batches / sources.batches_per_update)


def _in_samples(plugin: Any, sources: ScheduleSources) -> _Counted:
    if sources.global_batch_size is None:
        raise ConfigurationError(
            "A schedule in samples needs the batch size: pass the DataLoader to the same prepare "
            "call, or give train_iters."
        )
    for name in ("train_iters", "lr_decay_iters", "lr_warmup_iters"):
        if getattr(plugin, name) is not None:
            raise ConfigurationError(
                f"{name}={getattr(plugin, name)} counts updates, but the training is counted in "
                f"samples. Give {name.replace('iters', 'samples')}, or train_iters."
            )
    decay = plugin.lr_decay_samples or plugin.train_samples
    warmup = plugin.lr_warmup_samples
    if warmup is None and plugin.lr_warmup_fraction is not None:
        warmup = plugin.lr_warmup_fraction * decay
    if warmup is None:
        warmup = _warmup_updates(sources) * sources.global_batch_size
    wsd_decay = _wsd_decay(plugin, sources, "samples")
    return _Counted(
        "samples", plugin.train_samples, decay, warmup, wsd_decay, sources.global_batch_size
    )


def _wsd_decay(plugin: Any, sources: ScheduleSources, unit: str) -> int | None:
    """Return over how many steps a WSD schedule falls; None for the other styles."""
    if plugin.lr_decay_style != "WSD":
        return None
    length: int | None = sources.arguments.get(f"wsd_decay_{unit}")
    if length is None:
        raise ConfigurationError(
            f"lr_decay_style is 'WSD', which needs to know over how many {unit} the rate falls at "
            f"the end: give other_megatron_args={{'lr_wsd_decay_{unit}': ...}}."
        )
    return length


def _check_lengths(plugin: Any, counted: _Counted) -> None:
    warmup, decay, unit = counted.warmup, counted.decay, counted.unit
    if warmup >= decay:
        raise ConfigurationError(
            f"The learning rate would warm up over {warmup:g} {unit} and decay until {decay}; "
            "warm-up must end before the decay does."
        )
    wsd_decay = counted.wsd_decay
    if wsd_decay is not None and not 0 < wsd_decay <= decay - warmup:
        raise ConfigurationError(
            f"lr_wsd_decay is {wsd_decay} {unit}; it must be above 0 and at most the "
            f"{decay - warmup:g} {unit} between warm-up and the end of the decay ({decay})."
        )


def _weight_decay(
    plugin: Any, weight_decays: Sequence[float], counted: _Counted
) -> tuple[float | None, float | None]:
    """Return the first and the last weight decay; None for constant ones, the groups' own."""
    style = plugin.weight_decay_incr_style
    if style == "constant":
        return None, None
    if counted.total is None:
        raise ConfigurationError(
            f"weight_decay_incr_style={style!r} needs the length of the training, over which the "
            "weight decay changes: give train_iters or train_samples besides the length of the "
            "learning rate's decay."
        )
    used = sorted({decay for decay in weight_decays if decay})
    if weight_decays and not used:
        raise ConfigurationError(
            f"weight_decay_incr_style={style!r} would have no effect: every parameter group of "
            "the optimizer has weight_decay=0, which exempts it. Give the optimizer a "
            "weight_decay, or leave weight_decay_incr_style out."
        )
    if len(used) > 1:
        raise ConfigurationError(
            f"weight_decay_incr_style={style!r} moves one weight decay from start_ to "
            f"end_weight_decay, but the optimizer's groups have {len(used)} of them "
            f"({', '.join(f'{decay:g}' for decay in used)}). Give them one, or 0."
        )
    return plugin.start_weight_decay, plugin.end_weight_decay
