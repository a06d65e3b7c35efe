"""One model in training: its chunks, optimizer and scheduler, and what a step does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron import engine
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.errors import TrainingLoopError
from accelerate_megatron.faults.non_finite import FiniteGuard
from accelerate_megatron.training.balance import BalanceStep
from accelerate_megatron.training.context import ContextParallelStep
from accelerate_megatron.training.loop import LoopWatch
from accelerate_megatron.training.loss import counted_loss, loss_key
from accelerate_megatron.training.t5 import stack_lengths
from accelerate_megatron.training.train_step import AbstractTrainStep


class TrainingSession:
    """The engine's side of one prepared model.

    Attributes:
        run: The resolved run.
        ranks: This rank's position and groups.
        chunks: This rank's model chunks, wrapped.
        optimizer: Megatron's optimizer; None when none was prepared.
        scheduler: Megatron's scheduler; None when none was prepared.
        train_step: The functions given to the schedule.
        grad_norm: Global gradient norm of the last update, before clipping.
        num_zeros: Gradients of the last update that are zero, where they are counted.
        num_updates: Updates done.
        loop: Notices what the training loop gets wrong.
    """

    def __init__(
        self,
        run: RunConfig,
        ranks: engine.Ranks,
        chunks: list[torch.nn.Module],
        train_step: AbstractTrainStep,
        randomness: engine.ModelRandomness,
        device: torch.device,
    ) -> None:
        """Build optimizer and scheduler over `chunks`, whose weights are already theirs."""
        self.run = run
        self.ranks = ranks
        self.chunks = chunks
        self.train_step = train_step
        self.device = device
        self.optimizer: Any = None
        self.scheduler: Any = None
        if run.optimizer is not None:
            self.optimizer = engine.build_optimizer(chunks, run, run.optimizer)
            if run.schedule is not None:
                self.scheduler = engine.build_scheduler(self.optimizer, run.optimizer, run.schedule)
        self.grad_norm: float | None = None
        self.num_zeros: float | None = None
        self._evaluated = (0.0, 0.0)
        self.step_was_skipped = False
        self.num_updates = 0
        self.loop = LoopWatch()
        self.randomness = randomness
        self.guard = FiniteGuard("stop")
        self.watch: Callable[[str], AbstractContextManager[None]] = lambda _what: nullcontext()
        self.before_update: Callable[[], None] = lambda: None
        """Called by every rank at the beginning of an update; what it raises ends the update."""
        self._recorder = engine.LogitsRecorder(chunks, run) if run.return_logits else None
        self._context: ContextParallelStep | None = None
        if run.layout.cp_size > 1:
            self._context = ContextParallelStep(train_step, ranks, per_token=run.per_token_loss)
        self._balance: BalanceStep | None = None
        if run.balances_experts:
            self._balance = BalanceStep(run, ranks, chunks, device)

    @property
    def rate_has_ended(self) -> bool:
        """Whether the schedule is over and has left a learning rate of 0."""
        if self.scheduler is None or self.run.schedule is None:
            return False
        is_over = self.scheduler.num_steps >= self.run.schedule.decay_steps
        return is_over and all(group["lr"] == 0 for group in self.optimizer.param_groups)

    def update(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Do one update and return the loss. Every rank calls it.

        Args:
            batch: This data-parallel rank's rows, [num_micro_batches x micro-batch, s].

        Returns:
            The loss before the update, fp32 scalar without gradient, the same on all ranks.

        Raises:
            TrainingLoopError: No optimizer was prepared.
            NonFiniteError: The loss or the gradient norm is not finite, see `FaultPolicy`.
        """
        if self.optimizer is None:
            raise TrainingLoopError(
                "model(**batch) in training mode makes an update, but no optimizer was given to "
                "prepare. Pass it in the same call, or call model.eval() to evaluate."
            )
        self.before_update()
        engine.clear_gradients(self.chunks, self.optimizer)
        totals = self._totals_of(self._forward_and_backward(batch))
        if not self.run.per_token_loss:
            # Megatron has divided by all micro-batches, also by those of filler rows only.
            num_micro_batches = self.run.num_micro_batches * self.ranks.dp_size
            engine.scale_gradients(self.chunks, num_micro_batches / max(totals[1].item(), 1))
        loss = self._mean(totals)
        self.step_was_skipped, self.grad_norm, self.num_zeros = True, None, None
        if not self.guard.admits("loss", loss.item(), self.num_updates):
            return loss
        succeeded, grad_norm, self.num_zeros = engine.step_if(
            self.optimizer,
            lambda norm: self.guard.admits("gradient norm", norm, self.num_updates),
        )
        self.step_was_skipped = not succeeded
        self.grad_norm = None if grad_norm is None else float(grad_norm)
        if succeeded:
            self.num_updates += 1
            if self.scheduler is not None and self.run.schedule is not None:
                self.scheduler.step(increment=self.run.schedule.steps_per_update)
        return loss

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch without changing anything. Every rank calls it."""
        with torch.no_grad():
            totals = self._count(batch)
            total, weight = totals.tolist()
            self._evaluated = (self._evaluated[0] + total, self._evaluated[1] + weight)
            return self._mean(totals)

    def take_logits(self) -> dict[str, torch.Tensor]:
        """Return the logits of the last step's batch; see `LogitsRecorder.take`.

        Every rank calls it. Empty before the last stage, and without `return_logits`.
        """
        return {} if self._recorder is None else self._recorder.take()

    def take_evaluated(self) -> tuple[float, float]:
        """Return the sum of losses and its weight over all evaluations since it was last asked."""
        evaluated, self._evaluated = self._evaluated, (0.0, 0.0)
        return evaluated

    def _forward_and_backward(
        self, batch: Mapping[str, torch.Tensor]
    ) -> list[dict[str, torch.Tensor]]:
        """Put the gradients of the batch on the chunks; return the reports of its losses."""
        if self._balance is None:
            return self._run_schedule(batch, forward_only=False)
        with torch.no_grad(), self.randomness.rehearsal():
            counted = self._count(batch)
        with self._balance.training(counted[1].item()):
            return self._run_schedule(batch, forward_only=False)

    def _count(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run forward only; return the totals, and let the routers count where they balance."""
        counting = nullcontext() if self._balance is None else self._balance.counting(batch)
        with counting:
            reports = self._run_schedule(batch, forward_only=True)
        return self._totals_of(reports)

    def _run_schedule(
        self, batch: Mapping[str, torch.Tensor], *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        self.train_step.begin(batch, self._sum_over_replicas)
        micro_batches = split_rows(batch, self.run.num_micro_batches)
        rows, seq_length = micro_batches[0]["input_ids"].shape
        encoder_length = None
        if self.run.shape.encoder_decoder is not None:
            encoder_length, seq_length = stack_lengths(micro_batches[0])
        if self._context is not None:
            self._context.begin(seq_length)
        if self._recorder is not None:
            self._recorder.begin()
        with self.randomness.active():
            return engine.run_schedule(
                self.chunks,
                self._forward_step,
                micro_batches,
                micro_batch_size=rows,
                seq_length=seq_length,
                encoder_length=encoder_length,
                forward_only=forward_only,
            )

    def _forward_step(
        self, data_iterator: Any, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        if self._balance is not None:
            data_iterator = self._balance.noting(data_iterator, model)
        if self._context is not None:
            return self._context.forward_step(data_iterator, model)
        output, loss_func = self.train_step.forward_step(data_iterator, model)
        return output, partial(counted_loss, loss_func)

    def _sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` added up over the data-parallel ranks; all ranks call it."""
        summed = values.to(self.device, copy=True)
        dist.all_reduce(summed, group=self.ranks.dp_group)
        return summed

    def _totals_of(self, reports: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return [sum of losses, its weight] over all micro-batches and replicas, fp64 [2].

        The same on every rank. The weight is the number of tokens, or, for the mean of
        micro-batches' means, the number of micro-batches that have any.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.ranks.is_last_stage:
            for report in reports:
                totals += self._loss_and_weight(report)
            dist.all_reduce(totals, group=self.ranks.dp_group)
        dist.broadcast(totals, self.ranks.last_stage_rank, group=self.ranks.pp_group)
        return totals

    def _mean(self, totals: torch.Tensor) -> torch.Tensor:
        """Return the loss, fp32 scalar: sum over weight, 0 where nothing counts; and balance."""
        balance = 0.0 if self._balance is None else self._balance.loss
        return (totals[0] / totals[1].clamp(min=1) + balance).float()

    def _loss_and_weight(self, report: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return [weighted loss, weight] of one micro-batch, fp64 [2]."""
        loss = report[loss_key(report)].detach().to(self.device, torch.float64)
        if self.run.per_token_loss:
            return loss
        return torch.stack([loss[0] / loss[1].clamp(min=1), (loss[1] > 0).double()])


def split_rows(
    batch: Mapping[str, torch.Tensor], num_micro_batches: int
) -> list[dict[str, torch.Tensor]]:
    """Cut a batch into equal micro-batches along its rows; views, in order."""
    parts = {name: value.chunk(num_micro_batches) for name, value in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(num_micro_batches)]
