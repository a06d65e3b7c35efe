"""Random states of tensor parallelism, and recomputation of activations."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accelerate_megatron.engine.patches.patch import Patch, When
from accelerate_megatron.engine.versions import Version

_RANDOM = "megatron.core.tensor_parallel.random"


def _fork_of_one_state(upstream: Any) -> Callable[..., Any]:
    default_name: str = inspect.signature(upstream).parameters["name"].default

    @contextlib.contextmanager
    def fork(self: Any, name: str = default_name) -> Iterator[None]:
        """Draw from the random state `name`, then go on with the state outside.

        Like upstream's, but where that one compares the CPU's state before and after, to
        warn of CPU randomness in a section for the GPU: here the two are one.
        """
        if name not in self.states_:
            raise KeyError(f"There is no random state {name!r}, only {sorted(self.states_)}.")
        outer_name, outer_state = self._current_state_name, torch.get_rng_state()
        if outer_name in self.states_:
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            # A section inside this one may have drawn from the outer state by its name.
            torch.set_rng_state(self.states_.get(outer_name, outer_state))
            self._current_state_name = outer_name

    return fork


def _alias_parameters(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_alias_parameters(item) for item in output)
    return output.view_as(output) if isinstance(output, torch.nn.Parameter) else output


def _checkpoint_that_may_return_parameters(upstream: Any) -> Callable[..., Any]:
    def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
        def aliased(*inner: Any) -> Any:
            return _alias_parameters(function(*inner))

        return upstream(aliased, distribute_saved_activations, *args)

    return checkpoint


def _fp8_only_if_asked(upstream: Any) -> Callable[..., None]:
    def initialise(self: Any, fp8: Any = False) -> None:
        upstream(self, fp8=fp8 or None)

    return initialise


def _copy_storage(_upstream: Any) -> Callable[[], Callable[..., None]]:
    def share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        # Below autograd, so that neither a version is counted nor a view loses its storage.
        storage = output.untyped_storage()
        storage.resize_(recomputed.untyped_storage().size())
        storage.copy_(recomputed.untyped_storage())

    return lambda: share_storage


PATCHES = (
    Patch(
        module=_RANDOM,
        symbol="CudaRNGStatesTracker.fork",
        parameters=("self", "name"),
        when=When.NO_CUDA,
        replace=_fork_of_one_state,
        why=(
            "it warns at every dropout that the CPU's random state changed, which on the CPU is "
            "what it is for"
        ),
    ),
    Patch(
        module=_RANDOM,
        symbol="checkpoint",
        parameters=("function", "distribute_saved_activations", "args"),
        when=When.ALWAYS,
        replace=_checkpoint_that_may_return_parameters,
        why=(
            "a recomputed MLP returns its bias, a Parameter, whose grad_fn autograd overwrites: "
            "the backward pass then recurses for ever"
        ),
    ),
    Patch(
        module=_RANDOM,
        symbol="CheckpointWithoutOutput.__init__",
        parameters=("self", "fp8"),
        when=When.NO_TRANSFORMER_ENGINE,
        replace=_fp8_only_if_asked,
        why="fp8=False counts as `not None`, and then names of Transformer Engine are missing",
    ),
    Patch(
        module=_RANDOM,
        symbol="_get_share_storage",
        parameters=(),
        when=When.NO_CUDA,
        replace=_copy_storage,
        since=Version(0, 17, 0),
        why=(
            "it compiles C++ in the first backward pass, for which a machine without CUDA need "
            "not have the tools; a copy, as in 0.16, does the same"
        ),
    ),
)
