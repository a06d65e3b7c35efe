"""The model's own random numbers, apart from the user's.

Dropout must be the same on the tensor-parallel ranks where they hold the same
activations, and different where they hold different ones. Megatron's tracker keeps the
second kind; the first kind is torch's default generator, which a data loader or a
collator on one rank alone would move. So the model gets default states of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from accelerate_megatron.engine.groups import Ranks

_SEEDS_PER_REPLICA_STAGE = 100_003
"""More than the offsets that Megatron adds to one seed for its own kinds of ranks."""


class ModelRandomness:
    """The generator states that the forward and backward passes draw from."""

    def __init__(self, seed: int, ranks: Ranks, device: torch.device) -> None:
        """Seed all states; other for each pipeline stage, context-parallel rank and replica.

        The user's generators are left as they were.

        Args:
            seed: The same on every rank.
            ranks: This rank's position.
            device: Where the model computes.
        """
        self._device = device
        self._place = ranks.pp_rank + ranks.pp_size * (
            ranks.cp_rank + ranks.cp_size * ranks.dp_rank
        )
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Start all states anew from `seed`; the user's generators are left as they were."""
        users = self._get()
        model_parallel_cuda_manual_seed(seed + _SEEDS_PER_REPLICA_STAGE * self._place)
        self._state = self._get()
        self._set(users)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states: the default one, and those of Megatron's tracker by name."""
        tracked = get_cuda_rng_tracker().get_states()
        return {
            "default": self._state.clone(),
            "tracked": {name: _clone(held) for name, held in tracked.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank in the same layout."""
        self._state = state["default"].clone()
        _set_tracked({name: held.clone() for name, held in state["tracked"].items()})

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from the model's states inside the block, from the user's again after it."""
        users = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = self._get()
            self._set(users)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Draw inside the block what will be drawn again after it."""
        state = self._state.clone()
        tracker = get_cuda_rng_tracker()
        before = {name: _clone(held) for name, held in tracker.get_states().items()}
        try:
            yield
        finally:
            self._state = state
            _set_tracked(before)

    def _get(self) -> torch.Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)


def _clone(state: Any) -> torch.Tensor:
    """Return a copy of a state, which newer versions of Megatron-Core keep in a generator."""
    tensor: torch.Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return tensor.clone()


def _set_tracked(states: dict[str, torch.Tensor]) -> None:
    """Set the states of Megatron's tracker, in their generators where it keeps those."""
    tracker = get_cuda_rng_tracker()
    held_now = tracker.get_states()
    for name, held in held_now.items():
        if isinstance(held, torch.Generator):
            held.set_state(states[name])
        else:
            held_now[name] = states[name]
    tracker.set_states(held_now)
