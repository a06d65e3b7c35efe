"""What a checkpoint holds besides tensors and files of the user's: collected, and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from accelerate_megatron import engine
from accelerate_megatron.checkpoint.values import from_json, to_json
from accelerate_megatron.log import get_logger, log_once

logger = get_logger(__name__)


def common_state(accelerator: Any, session: Any) -> dict[str, Any]:
    """Return what is one for all ranks, as JSON: counters, scheduler, position in the data.

    Called on the rank that fetches for the first replica, whose view of the data counts.
    """
    return {
        "num_updates": session.num_updates,
        "iteration": accelerator.step,
        "scheduler_steps": None if session.scheduler is None else session.scheduler.num_steps,
        "seed": session.run.seed,
        "loaders": [to_json(loader.state_dict()) for loader in accelerator._dataloaders],
    }


def rank_state(accelerator: Any, session: Any) -> dict[str, Any]:
    """Return what each rank has of its own, as JSON: its random states."""
    return {
        "model_random": to_json(session.randomness.state_dict()),
        "user_random": to_json(_user_random(accelerator.device)),
        "boundaries": [
            to_json(loader.state_dict()["boundary"]) for loader in accelerator._dataloaders
        ],
    }


def optimizer_state(session: Any) -> dict[str, Any]:
    """Return the numbers of this rank's part of the optimizer, as JSON."""
    numbers: dict[str, Any] = to_json(engine.optimizer_numbers(session.optimizer))
    return numbers


def merge_optimizer_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of all ranks as one: they hold different parameter groups."""
    steps = [state["step"] for state in states if state["step"] is not None]
    merged = {**states[0], "step": max(steps, default=None), "groups": {}}
    for state in states:
        merged["groups"].update(state["groups"])
    return merged


def put_back_common(
    accelerator: Any, session: Any, state: dict[str, Any], *, with_scheduler: bool
) -> None:
    """Set counters and, if wanted, the scheduler; the rates of the next update follow from it."""
    session.num_updates = state["num_updates"]
    accelerator.step = state["iteration"]
    if not with_scheduler or session.scheduler is None:
        return
    if state["scheduler_steps"] is not None:
        session.scheduler.num_steps = state["scheduler_steps"]
        session.scheduler.step(increment=0)


def put_back_loaders(
    accelerator: Any, states: list[dict[str, Any]], boundaries: list[Any] | None
) -> None:
    """Set the position in each loader, in the order in which they were prepared.

    Args:
        accelerator: Holds the loaders.
        states: Those of `common_state`.
        boundaries: Those of this rank; None when the replicas are others than when saving.
    """
    loaders = accelerator._dataloaders
    if len(loaders) != len(states):
        log_once(
            logger,
            f"The checkpoint has the positions of {len(states)} DataLoaders and {len(loaders)} are "
            "prepared: they are matched in order, and the rest begins at the start.",
        )
    for index, (loader, state) in enumerate(zip(loaders, states, strict=False)):
        boundary = None if boundaries is None else boundaries[index]
        loader.load_state_dict({**from_json(state), "boundary": from_json(boundary)})


def put_back_random(accelerator: Any, session: Any, state: dict[str, Any]) -> None:
    """Set this rank's random states, the model's and the user's."""
    session.randomness.load_state_dict(from_json(state["model_random"]))
    _set_user_random(from_json(state["user_random"]), accelerator.device)


def put_back_random_of_other_layout(
    accelerator: Any, session: Any, common: dict[str, Any], first: dict[str, Any]
) -> None:
    """Set random states where ranks stand elsewhere than when saving.

    The user's are those of the first rank. The model's begin anew, from a seed that differs from
    that of the start, lest the dropout of the first updates come again.
    """
    session.randomness.reseed((common["seed"] + 7919 * common["num_updates"]) % 2**31)
    _set_user_random(from_json(first["user_random"]), accelerator.device)


def _user_random(device: torch.device) -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_user_random(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
