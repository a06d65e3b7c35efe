"""The schedules of a run, from the script's stand-in, its DataLoader and the plugin."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from accelerate.utils import MegatronLMDummyScheduler as UpstreamDummyScheduler
from torch.utils.data import DataLoader

from accelerate_megatron.config.run import OptimizerSettings, RunConfig, ScheduleSettings
from accelerate_megatron.config.schedule import (
    ScheduleSources,
    resolve_schedule,
    total_updates,
)
from accelerate_megatron.data.order import micro_batch_size_of
from accelerate_megatron.data.rebatch import with_micro_batch_size
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.log import get_logger, log_once

logger = get_logger(__name__)


def schedule_of_run(
    train_loader: DataLoader[Any] | None,
    scheduler: UpstreamDummyScheduler,
    plugin: Any,
    run: RunConfig,
    optimizer: OptimizerSettings,
) -> ScheduleSettings:
    """Return the schedules of rate and weight decay that the script's stand-in asks for.

    Args:
        train_loader: The DataLoader that is trained on, if one is given.
        scheduler: The stand-in.
        plugin: The plugin.
        run: The run as far as it is resolved.
        optimizer: Settings of the optimizer.

    Raises:
        ConfigurationError: The rates contradict each other.
    """
    batches_per_update = Fraction(run.layout.dp_size * run.num_micro_batches)
    length = updates_per_epoch = None
    if train_loader is not None and run.micro_batch_size is not None:
        length = _length(train_loader)
        micro_batches = _length(with_micro_batch_size(train_loader, run.micro_batch_size))
        if micro_batches is not None:
            updates_per_epoch = math.ceil(micro_batches / batches_per_update)
        # Another loader may have decided the micro-batch.
        given = micro_batch_size_of(train_loader)
        batches_per_update *= Fraction(run.micro_batch_size, given)
    sources = ScheduleSources(
        total_batches=scheduler.total_num_steps,
        warmup_batches=scheduler.warmup_num_steps,
        loader_length=length,
        updates_per_epoch=updates_per_epoch,
        batches_per_update=batches_per_update,
        global_batch_size=run.global_batch_size,
        weight_decays=[group.weight_decay for group in optimizer.groups],
        arguments=plugin.routed_arguments.of("schedule"),
    )
    schedule = resolve_schedule(plugin, sources)
    updates = total_updates(plugin, sources)
    if updates is not None:
        log_once(
            logger,
            f"total_num_steps={scheduler.total_num_steps} of MegatronLMDummyScheduler counts "
            f"batches of the DataLoader before prepare: {updates} updates of "
            f"{run.layout.dp_size} data-parallel ranks x {run.num_micro_batches} micro-batches. "
            f"If updates were meant, set MegatronLMPlugin(train_iters="
            f"{scheduler.total_num_steps}).",
        )
    _check_rates(optimizer, schedule)
    return schedule


def _check_rates(optimizer: OptimizerSettings, schedule: ScheduleSettings) -> None:
    for name, limit, how in (
        ("min_lr", schedule.min_lr, "from which the schedule falls to it"),
        ("lr_warmup_init", schedule.init_lr, "to which the warm-up rises from it"),
    ):
        below = sorted({group.lr for group in optimizer.groups if group.lr < limit})
        if below:
            raise ConfigurationError(
                f"{name}={limit:g} is above the optimizer's learning rate "
                f"({', '.join(f'{rate:g}' for rate in below)}), {how}. Set {name} to "
                f"{below[0]:g} or less."
            )


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable dataset has none
        return None
