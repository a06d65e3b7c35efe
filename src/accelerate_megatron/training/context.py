"""A step under context parallelism: each rank reads its part, the loss sees the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accelerate_megatron import engine
from accelerate_megatron.errors import TrainingLoopError, UnsupportedError
from accelerate_megatron.training.loss import counted_loss
from accelerate_megatron.training.train_step import AbstractTrainStep, BatchFunction


def check_splits_sequences(
    step: AbstractTrainStep, cp_size: int, nearest: Callable[[], str | None]
) -> None:
    """Refuse a train step that does not say that context parallelism can cut its batches.

    Args:
        step: The train step.
        cp_size: Context-parallel ranks.
        nearest: Names layouts without context parallelism, for the refusal.

    Raises:
        UnsupportedError: There is context parallelism, and `splits_sequences` is not set.
    """
    if cp_size > 1 and not step.splits_sequences:
        problem = (
            f"context_parallel_size is {cp_size}, but {step.name} does not say that its batches "
            "can be cut along the sequence. If every tensor [b, s, ...] of its batch holds one "
            "entry per token, set splits_sequences = True on its class; else set "
            "context_parallel_size to 1."
        )
        raise UnsupportedError.of([problem], advice=nearest())


class ContextParallelStep:
    """Makes a train step that knows nothing of context parallelism run under it.

    What its `get_batch` returns is cut to this rank's tokens, after the labels were shifted.
    Its loss function is given the losses of all tokens, and its bound masks whole again: it
    computes what it would in one process, on every rank alike.
    """

    def __init__(self, step: AbstractTrainStep, ranks: engine.Ranks, *, per_token: bool) -> None:
        """Take over `step.get_batch`.

        Args:
            step: The train step, which `check_splits_sequences` has seen.
            ranks: This rank's position.
            per_token: Whether Megatron divides by the tokens of the global batch.
        """
        self._step = step
        self._ranks = ranks
        self._per_token = per_token
        self._seq_length = 0
        self._was_read = False
        step.get_batch = partial(self._read, step.get_batch)

    def begin(self, seq_length: int) -> None:
        """Say how many tokens the rows of the coming micro-batches have."""
        self._seq_length = seq_length

    def forward_step(
        self, data_iterator: Any, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Run the step's own forward step; its loss function comes back wrapped.

        Raises:
            TrainingLoopError: It did not read through `self.get_batch`.
        """
        self._was_read = False
        output, loss_func = self._step.forward_step(data_iterator, model)
        if not self._was_read:
            raise TrainingLoopError(
                f"The forward step of {self._step.name} did not call self.get_batch, which is "
                f"where a batch is cut for context_parallel_size={self._ranks.cp_size}. Read the "
                "batch with self.get_batch(data_iterator)."
            )
        return output, partial(self._loss, loss_func)

    def _read(self, get_batch: BatchFunction, data_iterator: Any) -> Any:
        self._was_read = True
        batch = get_batch(data_iterator)
        if isinstance(batch, dict):
            return {name: self._cut(value) for name, value in batch.items()}
        return tuple(self._cut(value) for value in batch)

    def _cut(self, value: Any) -> Any:
        """Return this rank's part of a tensor with one entry per token; others as they are."""
        if not _has_tokens(value, self._seq_length):
            return value
        ranks = self._ranks
        return engine.take_slice(value, dim=1, rank=ranks.cp_rank, size=ranks.cp_size)

    def _loss(
        self, loss_func: Callable[..., Any], output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return (sum, tokens, report) over the tokens of all context-parallel ranks.

        The sum has a gradient through this rank's tokens only; Megatron adds gradients up over
        data- and context-parallel ranks. With per-token loss it adds up the tokens over them
        too, so one rank alone counts them; without, it divides gradients by those ranks.
        """
        if isinstance(loss_func, partial):
            loss_func = partial(
                loss_func.func,
                *[self._whole(value) for value in loss_func.args],
                **{name: self._whole(value) for name, value in loss_func.keywords.items()},
            )
        total, count, report = counted_loss(loss_func, self._whole(output))
        if self._per_token:
            return total, count if self._ranks.cp_rank == 0 else torch.zeros_like(count), report
        return total * self._ranks.cp_size, count, report

    def _whole(self, value: Any) -> Any:
        if not _has_tokens(value, self._seq_length // self._ranks.cp_size):
            return value
        sequence_first = value.transpose(0, 1)
        whole = engine.gather_sequence(
            sequence_first, self._ranks.cp_group, grads_are_partial=False
        )
        return whole.transpose(0, 1)


def _has_tokens(value: Any, number: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == number
