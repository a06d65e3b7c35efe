"""Reading the user's torch optimizer into the engine's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from accelerate_megatron.config.run import GroupSettings, OptimizerSettings
from accelerate_megatron.errors import ConfigurationError, UnsupportedError

_KINDS: dict[type, str] = {
    torch.optim.AdamW: "adam",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
}
_OPTIONS = {"adam": ("betas", "eps"), "sgd": ("momentum", "dampening", "nesterov")}
_REFUSED_OPTIONS = ("amsgrad", "maximize", "differentiable")


ParameterCondition = Callable[[str, torch.nn.Parameter], bool]
"""(Hugging Face name, Hugging Face parameter) -> whether something holds for it."""


@dataclass(frozen=True)
class GroupConditions:
    """What the plugin says about single parameters, on top of the optimizer's groups.

    Attributes:
        no_weight_decay: Which parameters have no weight decay.
        scale_rate: Which parameters' rate is multiplied by `lr_factor`.
        lr_factor: The plugin's `lr_mult`.
    """

    no_weight_decay: ParameterCondition | None = None
    scale_rate: ParameterCondition | None = None
    lr_factor: float = 1.0

    @classmethod
    def of(cls, plugin: Any) -> GroupConditions:
        """Return the plugin's conditions."""
        return cls(plugin.no_wd_decay_cond, plugin.scale_lr_cond, plugin.lr_mult)


@dataclass(frozen=True, order=True)
class _Membership:
    """The group of the user's optimizer that a parameter is in, and what holds for it there."""

    group: int
    no_weight_decay: bool
    scale_rate: bool

    def __str__(self) -> str:
        words = [f"group {self.group}"]
        words += ["no weight decay"] if self.no_weight_decay else []
        words += ["rate x lr_mult"] if self.scale_rate else []
        return " with ".join([words[0], " and ".join(words[1:])] if words[1:] else words)


def read_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    sources: Mapping[str, Iterable[str]],
    *,
    conditions: GroupConditions | None = None,
) -> OptimizerSettings:
    """Return what `optimizer` does, for Megatron's parameters.

    Args:
        optimizer: torch's AdamW, Adam or SGD over parameters of `model`.
        model: The Hugging Face model.
        sources: For each canonical Megatron name, the Hugging Face names it is made of.
        conditions: What the plugin says about single parameters.

    Raises:
        UnsupportedError: The optimizer is of another class, or uses an option Megatron lacks.
        ConfigurationError: A trainable parameter is in no group, a group holds a stranger,
            or one fused Megatron parameter would belong to two groups.
    """
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        known = ", ".join(f"torch.optim.{cls.__name__}" for cls in _KINDS)
        raise UnsupportedError(
            f"The optimizer is a {type(optimizer).__module__}.{type(optimizer).__qualname__}; "
            f"Megatron runs {known}."
        )
    _refuse_options(optimizer)
    conditions = conditions or GroupConditions()
    memberships = _memberships(optimizer, model, conditions)
    used: dict[str, _Membership] = {}
    for name, hf_names in sources.items():
        membership = _common_membership(name, {hf: memberships[hf] for hf in hf_names})
        if membership is not None:
            used[name] = membership
    if not used:
        raise ConfigurationError(
            "No parameter of the model is trainable: every requires_grad is False. Set it to True "
            "where there is something to learn, or leave the optimizer out."
        )
    whole = [_Membership(index, False, False) for index in range(len(optimizer.param_groups))]
    kept = whole + sorted(set(used.values()) - set(whole))
    return OptimizerSettings(
        kind=kind,  # type: ignore[arg-type]  # one of the two words of _KINDS
        decoupled_weight_decay=_is_decoupled(optimizer),
        groups=tuple(_settings_of(part, optimizer, conditions, _OPTIONS[kind]) for part in kept),
        group_of={name: kept.index(membership) for name, membership in used.items()},
    )


def _settings_of(
    membership: _Membership,
    optimizer: torch.optim.Optimizer,
    conditions: GroupConditions,
    options: tuple[str, ...],
) -> GroupSettings:
    settings = _group_settings(optimizer.param_groups[membership.group], options)
    if membership.no_weight_decay:
        settings = replace(settings, weight_decay=0.0)
    if membership.scale_rate:
        settings = replace(settings, lr_factor=conditions.lr_factor)
    return replace(settings, user_group=membership.group)


def _memberships(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, conditions: GroupConditions
) -> dict[str, _Membership | None]:
    """Return what holds for each parameter, by Hugging Face name; None: frozen."""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def holds(condition: ParameterCondition | None, name: str) -> bool:
        return condition is not None and bool(condition(name, parameters[name]))

    return {
        name: None
        if group is None
        else _Membership(
            group, holds(conditions.no_weight_decay, name), holds(conditions.scale_rate, name)
        )
        for name, group in _groups_by_name(optimizer, model).items()
    }


def _refuse_options(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for option in _REFUSED_OPTIONS:
            if group.get(option):
                raise UnsupportedError(
                    f"The optimizer has {option}={group[option]}, which Megatron's does not "
                    f"have; set {option}=False."
                )


def kind_of(optimizer: torch.optim.Optimizer | None) -> tuple[str | None, bool]:
    """Return "adam" or "sgd", and whether weight decay is AdamW's; (None, False) for any other."""
    kind = _KINDS.get(type(optimizer))
    return kind, optimizer is not None and kind is not None and _is_decoupled(optimizer)


def _is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) is torch.optim.AdamW:
        return True
    return bool(optimizer.defaults.get("decoupled_weight_decay", False))


def _groups_by_name(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> dict[str, int | None]:
    """Return the index of each parameter's group by Hugging Face name; None: frozen."""
    group_of_id = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    # A router's correction bias is a buffer: no gradient moves it.
    groups: dict[str, int | None] = dict.fromkeys(name for name, _ in model.named_buffers())
    # By every name: a T5's output layer, tied in an empty model, may not be so in its folder.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[name] = group_of_id.get(id(parameter)) if parameter.requires_grad else None
    left_out = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in group_of_id
    ]
    if left_out:
        raise ConfigurationError(
            f"{len(left_out)} trainable parameters are in no group of the optimizer "
            f"({_sample(left_out)}). Give them to the optimizer, or set requires_grad to False."
        )
    strangers = group_of_id.keys() - {id(parameter) for parameter in model.parameters()}
    if strangers:
        raise ConfigurationError(
            f"The optimizer holds {len(strangers)} parameters that are not the model's. Build "
            "it from the parameters of the model given to the same prepare call."
        )
    return groups


def _common_membership(
    name: str, memberships: Mapping[str, _Membership | None]
) -> _Membership | None:
    """Return the one membership of all parts of a fused parameter, or refuse the mixture."""
    if len(set(memberships.values())) == 1:
        return next(iter(memberships.values()))
    described = ", ".join(
        f"{hf} ({'frozen' if membership is None else membership})"
        for hf, membership in memberships.items()
    )
    raise ConfigurationError(
        f"Megatron fuses these parameters into one, {name}, so they must be in one group of the "
        "optimizer, or all frozen, and no_wd_decay_cond and scale_lr_cond must say the same of "
        f"them: {described}."
    )


def _group_settings(group: Mapping[str, Any], options: tuple[str, ...]) -> GroupSettings:
    return GroupSettings(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        options={
            option: tuple(float(beta) for beta in group[option])
            if option == "betas"
            else group[option]
            for option in options
        },
    )


def _sample(names: list[str]) -> str:
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
