"""Adam where there is neither Transformer Engine nor Apex, and SGD for all optimizers."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_megatron.engine.fused_adam import FusedAdam
from accelerate_megatron.engine.patches.patch import Patch, When

_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_WHY_ADAM = (
    "the distributed optimizer saves one step per group, as Apex's FusedAdam keeps it; with "
    "torch's AdamW, its fallback, it resumes with a wrong state or not at all"
)


def _without_fused_adam(module: str, symbol: str, *, found: object, becomes: object) -> Patch:
    return Patch(
        module=module,
        symbol=symbol,
        may_be=lambda upstream: upstream is found,
        may_be_text=repr(found),
        when=When.NO_FUSED_ADAM,
        replace=lambda _upstream: becomes,
        why=_WHY_ADAM,
    )


def _is_class(found: Any) -> bool:
    return isinstance(found, type)


def _adam_or_sgd(found: Any) -> tuple[type, type]:
    """Return what the distributed optimizer may wrap: the name's only use is an isinstance."""
    is_fallback = found is torch.optim.Adam
    return (FusedAdam if is_fallback else found, torch.optim.SGD)


PATCHES = (
    _without_fused_adam(_OPTIMIZER, "Adam", found=torch.optim.AdamW, becomes=FusedAdam),
    _without_fused_adam(_OPTIMIZER, "USING_PYTORCH_OPTIMIZER", found=True, becomes=False),
    _without_fused_adam(_DISTRIBUTED, "HAVE_APEX_OR_TE", found=False, becomes=True),
    _without_fused_adam(_DISTRIBUTED, "USING_APEX_OPTIMIZER", found=False, becomes=True),
    Patch(
        module=_DISTRIBUTED,
        symbol="Adam",
        may_be=_is_class,
        may_be_text="a class",
        when=When.ALWAYS,
        replace=_adam_or_sgd,
        why=(
            f"without Transformer Engine and Apex, {_WHY_ADAM}; and everywhere it asserts that it "
            "wraps Adam, though it steps SGD rightly"
        ),
    ),
    Patch(
        module=_OPTIMIZER,
        symbol="SGD",
        may_be=_is_class,
        may_be_text="a class",
        when=When.ALWAYS,
        replace=lambda _upstream: torch.optim.SGD,
        why="one SGD everywhere, with the options of the script's (dampening, nesterov)",
    ),
)
