"""A loss function of any documented form in the one form that the session works with.

Megatron's loss functions return (loss, report) or (sum, tokens, report). Here all of them
become (sum, tokens, report) with the loss in the report as [sum, tokens], so that means are
taken once, over all micro-batches and replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from accelerate_megatron.errors import TrainingLoopError

LOSS_KEYS = ("lm loss", "loss")
"""Names under which a loss function reports the loss; else its first entry is taken."""


def counted_loss(
    loss_func: Callable[..., Any], output: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return (sum, tokens, report) of one micro-batch, whatever `loss_func` returns.

    Two values are a mean and its report. With them and per-token loss, Megatron would sum
    gradients over the data-parallel ranks; a mean times its count is the sum. A micro-batch
    of filler rows has no mean: what a function makes of 0 / 0 is not used.

    Args:
        loss_func: What a train step's forward step returned.
        output: The last chunk's output, loss per token [b, s] for the built-in steps.

    Raises:
        TrainingLoopError: It returned something else, or a mean without a mask bound to it.
    """
    returned = loss_func(output)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise TrainingLoopError(
            f"The loss function returned {type(returned).__name__}"
            f"{f' of {len(returned)} values' if isinstance(returned, tuple) else ''}; it has to "
            "return (loss, report) or (sum of losses, number of tokens, report)."
        )
    report = dict(returned[-1])
    key = loss_key(report)
    if len(returned) == 3:
        total, count = returned[0], returned[1]
    else:
        count = _num_counted(loss_func, output)
        has_any = bool(count > 0)
        total = returned[0] * count if has_any else _first(output).sum() * 0.0
    report[key] = _sum_and_count(report[key], count)
    return total, count.int(), report


def loss_key(report: Mapping[str, Any]) -> str:
    """Return the name under which the loss is in a report.

    Raises:
        TrainingLoopError: The report is empty.
    """
    if not report:
        raise TrainingLoopError(
            "The loss function reported nothing; its last value has to be a dictionary with the "
            'loss in it, such as {"lm loss": loss}.'
        )
    return next((key for key in LOSS_KEYS if key in report), next(iter(report)))


def _num_counted(loss_func: Callable[..., Any], output: Any) -> torch.Tensor:
    """Return how many tokens count, from the loss mask that is bound to `loss_func`.

    The mask is bound with functools.partial, possibly among other tensors: it is the one
    that is shaped like the loss per token and holds no integers.

    Raises:
        TrainingLoopError: There is none. What a mean weighs beside those of other micro-batches,
            of which some may be filler alone, cannot be known then.
    """
    output = _first(output)
    bound: tuple[Any, ...] = ()
    if isinstance(loss_func, partial):
        bound = (*loss_func.args, *loss_func.keywords.values())
    for value in bound:
        if not isinstance(value, torch.Tensor) or value.shape != output.shape:
            continue
        if value.is_floating_point() or value.dtype == torch.bool:
            return (value != 0).sum()
    raise TrainingLoopError(
        "The loss function returned (loss, report), a mean, but not over how many tokens: no loss "
        f"mask of the output's shape {list(output.shape)} is bound to it. Bind the mask with "
        "functools.partial(loss_func, loss_mask), or return (sum of losses, number of tokens, "
        "report)."
    )


def _first(output: Any) -> torch.Tensor:
    """Return the loss per token of a model that gives more than that, such as a BERT."""
    first: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return first


def _sum_and_count(reported: Any, count: torch.Tensor) -> torch.Tensor:
    """Return [sum, count], fp64, of what is reported: both already, or a mean."""
    value = torch.as_tensor(reported, dtype=torch.float64, device=count.device).detach()
    if value.numel() == 2:
        return value.reshape(2)
    mean = value.reshape(()).masked_fill(count == 0, 0.0)
    return torch.stack([mean * count, count.double()])
