"""What `ranks` and its server say to each other, and how it is written down."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


class RankFailedError(RuntimeError):
    """What a rank showed when it failed: its traceback, or the end of its output."""


class RankTimeoutError(TimeoutError):
    """A call did not end in time; the stacks of the ranks that hung are in the text."""


class RankDiedError(RuntimeError):
    """A rank died without returning or raising."""


@dataclass(frozen=True)
class Call:
    """One function to run on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    num_ranks: int
    timeout: float
    wait_for_all: bool
    """Wait for the other ranks after one has failed, because their errors are wanted too."""
    env: dict[str, str]
    process_group: bool
    search_path: list[str] = field(default_factory=list)
    """The caller's `sys.path`: where the module of `function` is found."""


@dataclass
class Outcome:
    """How the call ended on one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    """The rank's traceback, or the end of what it wrote, when it failed."""
    ended_at: float = 0.0
    """When, on the machine's monotonic clock: the first failure is the cause of the others."""


def to_bytes(message: Any) -> bytes:
    """Return `message` pickled, with its tensors as their values and nothing else.

    Megatron-Core 0.19 replaces the function that torch's own pickles name to read a tensor: a
    tensor pickled by a rank would make the reader import Megatron.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            values = obj.detach().cpu().contiguous()
            raw = values.reshape(-1).view(torch.uint8).numpy().tobytes()
            return _tensor_of, (raw, str(obj.dtype), tuple(obj.shape))
        return NotImplemented


def _tensor_of(raw: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return values.view(getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
