"""Megatron's optimizer and parameter scheduler for a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    ParamKey,
    ParamWithNamePredicate,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from accelerate_megatron.config.run import (
    GroupSettings,
    OptimizerSettings,
    RunConfig,
    ScheduleSettings,
)
from accelerate_megatron.engine import translate
from accelerate_megatron.engine.build import named_parameters


def build_optimizer(
    chunks: list[torch.nn.Module], run: RunConfig, settings: OptimizerSettings
) -> MegatronOptimizer:
    """Return Megatron's optimizer over the wrapped chunks. Every rank calls it.

    Weights must have been imported: the fp32 copies of bf16 parameters are made here.
    """
    group_of = {
        id(parameter): settings.group_of[name]
        for name, parameter in named_parameters(chunks)
        if parameter.requires_grad
    }
    overrides = {
        ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                name=f"group {index}", fn=_is_in_group(group_of, index)
            )
        ): _group_overrides(group, run)
        for index, group in enumerate(settings.groups)
    }
    optimizer = get_megatron_optimizer(
        translate.optimizer_config(run, settings), chunks, config_overrides=overrides
    )
    _let_offloaded_train_main_copies(optimizer)
    for chunk in chunks:
        get_model_config(chunk).grad_scale_func = optimizer.scale_loss
    return optimizer


class _NotAdmittedError(Exception):
    """The gradient norm is not one to update with."""


def step_if(
    optimizer: MegatronOptimizer, admits: Callable[[float], bool]
) -> tuple[bool, float | None, int | None]:
    """Clip and update, unless the gradient norm is refused. Every rank calls it.

    Megatron's `step` computes the norm and updates in one call; `admits` is asked in between, so
    that it is computed once. What it raises leaves the weights as they are, too.

    Args:
        optimizer: From `build_optimizer`.
        admits: Given the norm over all ranks before clipping, the same on each.

    Returns:
        Whether an update was made, the norm, and the number of zeros where they are counted, as
        `step` does.
    """
    assert isinstance(optimizer, ChainedOptimizer), "another optimizer's step asks for no norm"
    compute = optimizer.get_grad_norm

    def get_grad_norm() -> float:
        norm: float = compute()
        if not admits(float(norm)):
            raise _NotAdmittedError
        return norm

    optimizer.get_grad_norm = get_grad_norm
    try:
        done: tuple[bool, float | None, int | None] = optimizer.step()
    except _NotAdmittedError:
        return False, None, None
    finally:
        del optimizer.get_grad_norm
    return done


def _let_offloaded_train_main_copies(optimizer: Any) -> None:
    """Build the optimizers inside an offloaded one anew over the fp32 copies.

    Without the distributed optimizer, Megatron puts fp32 copies in the place of bf16 parameters
    after the offloaded optimizer was built: it would look up the parameters it was built with.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner: Any = getattr(part, "optimizer", None)
        if hasattr(inner, "sub_optimizers") and getattr(part, "fp32_from_float16_groups", None):
            inner._init_sub_optimizers()


def _is_in_group(group_of: dict[int, int], index: int) -> Callable[[torch.nn.Parameter, str], bool]:
    def is_in_group(parameter: torch.nn.Parameter, _name: str) -> bool:
        return group_of[id(parameter)] == index

    return is_in_group


def _group_overrides(group: GroupSettings, run: RunConfig) -> dict[str, Any]:
    """Return what a parameter group holds for torch's optimizer and Megatron's scheduler.

    The scheduler reads max_lr, min_lr, lr_factor, start_wd and end_wd; without one, lr and
    weight_decay stay as they are.
    """
    schedule = run.schedule
    start, end = (schedule.start_weight_decay, schedule.end_weight_decay) if schedule else (0, 0)
    changes = schedule is not None and schedule.weight_decay_style != "constant"
    follows = changes and group.weight_decay != 0
    return {
        "lr": group.lr * group.lr_factor,
        "max_lr": group.lr,
        "min_lr": schedule.min_lr if schedule else group.lr,
        "lr_factor": group.lr_factor,
        "weight_decay": start if follows else group.weight_decay,
        "start_wd": start if follows else group.weight_decay,
        "end_wd": end if follows else group.weight_decay,
        "user_group": group.user_group,
        **group.options,
    }


class ParamScheduler(OptimizerParamScheduler):  # type: ignore[misc]  # megatron is untyped
    """Megatron's scheduler, with the factor on the rate that its groups once had themselves."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the rate of a group: the scheduled one, times the group's `lr_factor`."""
        rate: float = super().get_lr(param_group) * param_group.get("lr_factor", 1.0)
        return rate


def build_scheduler(
    optimizer: MegatronOptimizer, settings: OptimizerSettings, schedule: ScheduleSettings
) -> OptimizerParamScheduler:
    """Return Megatron's scheduler of learning rate and weight decay, in the schedule's steps."""
    first = settings.groups[0]
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    return ParamScheduler(
        optimizer,
        init_lr=schedule.init_lr,
        max_lr=first.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps,
        lr_decay_style=schedule.decay_style,
        start_wd=first.weight_decay if start is None else start,
        end_wd=first.weight_decay if end is None else end,
        wd_incr_steps=schedule.total_steps or schedule.decay_steps,
        wd_incr_style=schedule.weight_decay_style,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.wsd_decay_style,
    )
