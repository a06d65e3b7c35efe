"""What a retargeted `megatron.core` module sees in place of `torch.cuda`: the CPU.

Megatron-Core asks `torch.cuda` for the current device, streams, events, random states and
memory figures. Here each of these has its meaning on a CPU: the device is the CPU, work is
done when the call returns (so streams and events have nothing to wait for), the random
state is torch's own, and device memory is not counted. A name that is not here is looked
up in the real `torch.cuda`, so that classes used in annotations and `isinstance` stay what
they are, and a missing name stays an AttributeError.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")


class Stream:
    """A stream on a device where all work is done when the call returns."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self.device = _CPU

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (0, 0): there is one priority."""
        return (0, 0)

    def wait_stream(self, _stream: object) -> None:
        """Return at once: the other stream is always idle."""

    def wait_event(self, _event: object) -> None:
        """Return at once: the event has always happened."""

    def synchronize(self) -> None:
        """Return at once: this stream is always idle."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Return `event`, or a new one; it has already happened."""
        return Event() if event is None else event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None


class Event:
    """A moment that has always passed already."""

    def __init__(self, *_args: object, **_options: object) -> None:
        return None

    def record(self, _stream: object = None) -> None:
        """Do nothing: there is no queue to record in."""

    def wait(self, _stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def elapsed_time(self, _end: object) -> float:
        """Return 0.0: no device time passes here. Host timers measure CPU work."""
        return 0.0


class _EveryIndexIsTheCpu:
    """`torch.cuda.default_generators`, where every index means torch's one CPU generator."""

    def __getitem__(self, _index: object) -> torch.Generator:
        return torch.default_generator


class _DeviceModule(types.ModuleType):
    """A module that has some names of its own and takes the rest from a module of torch."""

    def __init__(self, real: types.ModuleType, **members: object) -> None:
        super().__init__(f"{__name__}.{real.__name__}", f"`{real.__name__}`, on the CPU.")
        self._real = real
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def _no_context(*_args: object, **_options: object) -> Iterator[None]:
    """Stand in for the context managers that select a stream or a device."""
    yield


def _nothing(*_args: object, **_options: object) -> None:
    """Stand in for calls that only order or time work on a GPU."""


def _constant(value: object) -> Callable[..., Any]:
    """Return a function that gives `value` whatever it is called with."""
    return lambda *_args, **_options: value


def _uncompiled(function: Any = None, **_options: object) -> Any:
    """Stand in for `torch.compile`, as a decorator with and without options."""
    return _uncompiled if function is None else function


def _get_rng_state(*_device: object, **_options: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_device: object, **_options: object) -> None:
    torch.set_rng_state(new_state)


def _lazy_call(callback: Callable[[], None], **_options: object) -> None:
    # torch.cuda queues the callback until CUDA is initialised; the CPU always is.
    callback()


def _build() -> _DeviceModule:
    idle = Stream()
    nvtx = {"range_push": _nothing, "range_pop": _nothing, "range": _no_context}
    random = {
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "initial_seed": torch.initial_seed,
    }
    memory = {
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": _constant({}),
        "memory_snapshot": _constant([]),
        "memory_allocated": _constant(0),
        "memory_reserved": _constant(0),
        "max_memory_allocated": _constant(0),
        "max_memory_reserved": _constant(0),
        "device_memory_used": _constant(0),
    }
    return _DeviceModule(
        torch.cuda,
        # The device: one, and it is the CPU. `is_available` is about CUDA, so it is False.
        current_device=_constant(_CPU),
        device_count=_constant(1),
        is_available=_constant(False),
        is_initialized=_constant(True),
        set_device=_nothing,
        device=_no_context,
        get_device_capability=_constant((0, 0)),
        get_device_properties=_constant(
            types.SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=1)
        ),
        _lazy_init=_nothing,
        _lazy_call=_lazy_call,
        uncompiled=_uncompiled,
        # Order of work: everything is done when the call returns.
        synchronize=_nothing,
        Stream=Stream,
        Event=Event,
        current_stream=_constant(idle),
        default_stream=_constant(idle),
        stream=_no_context,
        set_stream=_nothing,
        is_current_stream_capturing=_constant(False),
        nvtx=_DeviceModule(torch.cuda.nvtx, **nvtx),
        # Randomness: torch's one CPU generator.
        **random,
        random=_DeviceModule(torch.cuda.random, **random),
        default_generators=_EveryIndexIsTheCpu(),
        # Memory: not counted.
        **memory,
        memory=_DeviceModule(torch.cuda.memory, **memory),
        # Tensor types, for isinstance and `param.type()`.
        FloatTensor=torch.FloatTensor,
        HalfTensor=torch.HalfTensor,
        BFloat16Tensor=torch.BFloat16Tensor,
    )


device = _build()
