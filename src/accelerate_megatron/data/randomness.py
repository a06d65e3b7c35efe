"""Keeps the random numbers that make the data apart from those that train the model.

On the CPU, torch has one default generator, and the engine draws dropout from it: were the
fetching rank to shuffle with it, its dropout would no longer be that of its tensor-parallel peers.
So data is fetched under a stream of its own, and the default generator moves on every rank alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]
"""States of the global random generators, by library; what is missing is left alone."""


def capture_state() -> RandomState:
    """Return the states of the global generators of torch (on the CPU), Python and NumPy."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def restore_state(state: RandomState) -> None:
    """Set the global generators to `state`."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])


class RandomStream:
    """A sequence of random numbers that is drawn from the global generators while it is entered.

    Entering sets the generators to where the stream was left; leaving sets them back. Only the
    libraries named in the first state take part.
    """

    def __init__(self, state: RandomState) -> None:
        self._state = dict(state)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let what runs inside draw from this stream. Can be nested in another one."""
        outside = capture_state()
        restore_state(self._state)
        try:
            yield
        finally:
            inside = capture_state()
            self._state = {library: inside[library] for library in self._state}
            restore_state({library: outside[library] for library in self._state})


def torch_state(seed: int) -> RandomState:
    """Return the state of torch alone that `torch.manual_seed(seed)` would set."""
    return {"torch": torch.Generator().manual_seed(seed).get_state()}


def draw_seed() -> int:
    """Draw one number from torch's default generator, as a DataLoader and its sampler do."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def draw_from(state: RandomState) -> int:
    """Return what `draw_seed` would draw in `state`; no generator moves."""
    with RandomStream(state).entered():
        return draw_seed()
