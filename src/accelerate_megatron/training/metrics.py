"""The numbers of each update: loss, gradient norm, rate, tokens per second, TFLOP/s, MFU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from accelerate_megatron.config.logging import (
    encoder_decoder_flops,
    flops_per_token,
    peak_tflops,
)
from accelerate_megatron.log import get_logger, log_once
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.training.session import TrainingSession
from accelerate_megatron.training.t5 import stack_lengths

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """One call of `model(**batch)` in training mode. The same on every rank but for the time.

    Attributes:
        number: Updates done, this one included if it was not skipped.
        loss: Mean over the valid tokens of the global batch, before the update.
        grad_norm: Global norm before clipping.
        learning_rate: Of the first parameter group, in this update.
        weight_decay: Likewise.
        loss_scale: In fp16, else 1.
        num_zeros: Gradients that are zero; None where they are not counted.
        was_skipped: Whether it was left out because something was not finite.
        num_samples: Rows of the global batch, filler rows included.
        num_tokens: Positions of the global batch, padding included.
        seconds: From the call of the model to the end of the update.
        tflops_per_device: Of the model's matrix products, without recomputation.
    """

    number: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    weight_decay: float
    loss_scale: float
    num_zeros: float | None
    was_skipped: bool
    num_samples: int
    num_tokens: int
    seconds: float
    tflops_per_device: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.num_tokens / self.seconds

    def mfu(self, device: torch.device) -> float | None:
        """Return the part of the device's dense peak that was used; None for an unknown device.

        The peak of a CPU is measured once, as the rate of a large fp32 product on the threads
        that this rank has.
        """
        peak = device_peak_tflops(device)
        return None if peak is None else self.tflops_per_device / peak


class Meter:
    """Measures updates, and hands their records on.

    Attributes:
        last: The record of the last update; None before the first.
        listeners: Called with each record, on every rank.
    """

    def __init__(self, session: TrainingSession) -> None:
        self.last: UpdateRecord | None = None
        self.listeners: list[Callable[[UpdateRecord], None]] = []
        self._session = session

    def update(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make an update and return its loss, as `TrainingSession.update` does."""
        session = self._session
        group = session.optimizer.param_groups[0] if session.optimizer is not None else {}
        rate, decay = group.get("lr", 0.0), group.get("weight_decay", 0.0)
        started = time.perf_counter()
        loss = session.update(batch)
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        seconds = time.perf_counter() - started
        rows, tokens, work = _rows_tokens_and_work(session.run.shape, batch)
        num_tokens, work = tokens * session.ranks.dp_size, work * session.ranks.dp_size
        self.last = UpdateRecord(
            number=session.num_updates,
            loss=loss.item(),
            grad_norm=session.grad_norm,
            learning_rate=float(rate),
            weight_decay=float(decay),
            loss_scale=_loss_scale(session),
            num_zeros=session.num_zeros,
            was_skipped=session.step_was_skipped,
            num_samples=rows * session.ranks.dp_size,
            num_tokens=num_tokens,
            seconds=seconds,
            tflops_per_device=work / seconds / session.run.layout.world_size / 1e12,
        )
        for listener in self.listeners:
            listener(self.last)
        return loss


def _rows_tokens_and_work(
    shape: ModelShape, batch: Mapping[str, torch.Tensor]
) -> tuple[int, int, float]:
    """Return the rows and positions of a replica's batch, and its floating-point operations."""
    rows, length = batch["input_ids"].shape
    if shape.encoder_decoder is None:
        tokens = rows * length
        return rows, tokens, tokens * flops_per_token(shape, length)
    lengths = stack_lengths(batch)
    return rows, rows * sum(lengths), rows * encoder_decoder_flops(shape, *lengths)


def _loss_scale(session: TrainingSession) -> float:
    return float(session.optimizer.get_loss_scale()) if session.run.precision == "fp16" else 1.0


def device_peak_tflops(device: torch.device) -> float | None:
    """Return the dense peak of a device in TFLOP/s; None, said once, for an unknown one."""
    if device.type == "cpu":
        return _measured_cpu_peak(torch.get_num_threads())
    name = torch.cuda.get_device_name(device)
    peak = peak_tflops(name)
    if peak is None:
        log_once(logger, f"The dense peak of {name!r} is not known here: there is no MFU.")
    return peak


@lru_cache
def _measured_cpu_peak(_num_threads: int, size: int = 768) -> float:
    """Return the rate of a square fp32 product in TFLOP/s, the best of a few."""
    left, right = torch.ones(size, size), torch.ones(size, size)
    best = float("inf")
    for _ in range(4):  # the first one warms up
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best / 1e12


def memory_bytes(device: torch.device) -> dict[str, Any]:
    """Return the memory in use and its most so far: of the CUDA device, or of the process."""
    if device.type == "cuda":
        return {
            "memory": torch.cuda.memory_allocated(device),
            "peak memory": torch.cuda.max_memory_allocated(device),
        }
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak memory": most}
