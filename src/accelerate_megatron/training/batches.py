"""What `model(**batch)` lets through: batches of our loaders, and hand-made ones that fit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accelerate_megatron import engine
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.data.checks import (
    BatchLimits,
    RealPart,
    check_length,
    check_micro_batch,
    mark_real_part,
    real_part,
    was_checked,
)
from accelerate_megatron.data.collate import BatchShape, join_micro_batches
from accelerate_megatron.errors import BatchError, TrainingLoopError
from accelerate_megatron.failures import name_ranks, on_every_rank
from accelerate_megatron.training.balance import ROUTED, routed_tokens
from accelerate_megatron.training.model_kinds import batch_limits, batch_rules
from accelerate_megatron.training.train_step import AbstractTrainStep
from accelerate_megatron.weights.holders import gather_objects


class BatchGate:
    """Admits batches to the schedule, on all ranks alike.

    A batch from a prepared DataLoader was checked where it was fetched and is equal on the
    ranks of a replica. Any other batch is checked here, and the ranks compare theirs.

    Attributes:
        limits: What the model takes.
    """

    def __init__(
        self,
        run: RunConfig,
        ranks: engine.Ranks,
        device: torch.device,
        train_step: AbstractTrainStep,
    ) -> None:
        self.limits = BatchLimits(
            vocab_size=run.shape.vocab_size,
            max_positions=run.shape.max_positions,
            required_keys=train_step.required_keys,
            **batch_limits(run.shape),
        )
        self._train_step = train_step
        self._run = run
        self._ranks = ranks
        self._device = device

    def admit(self, batch: Mapping[str, Any], *, is_update: bool) -> dict[str, torch.Tensor]:
        """Return the batch's tensors, [num_micro_batches x micro-batch, s] on the device.

        Every rank calls it.

        Args:
            batch: What the model was called with.
            is_update: Whether it is trained on; the same on every rank.

        Raises:
            BatchError: On any rank the batch does not fit, or the ranks of one replica have
                different ones.
            TrainingLoopError: Some ranks train on it and some evaluate.
        """
        is_other, trains, evaluates = self._on_any_rank(
            not self._is_from_loader(batch), is_update, not is_update
        )
        if trains and evaluates:
            self._refuse_two_modes(is_update)
        if is_other:
            batch = self._check_by_all(batch)
        tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        if self._run.balances_experts:
            tensors[ROUTED] = routed_tokens(batch, real_part(batch["input_ids"]))
        return {key: value.to(self._device) for key, value in tensors.items()}

    def _on_any_rank(self, *flags: bool) -> list[bool]:
        """Say which flags are set on any rank: all must take the same way from here."""
        raised = torch.tensor([float(flag) for flag in flags], device=self._device)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in raised.tolist()]

    def _refuse_two_modes(self, is_update: bool) -> NoReturn:
        evaluating = [rank for rank, trains in enumerate(gather_objects(is_update)) if not trains]
        raise TrainingLoopError(
            f"The model was called for an evaluation on {name_ranks(evaluating)} and for an update "
            "on the others. Call model.train(), model.eval() and torch.no_grad() alike on every "
            "rank."
        )

    def _unread_keys(self, batch: Mapping[str, Any]) -> list[str]:
        known = self._train_step.batch_keys
        return [] if known is None else [key for key in batch if key not in known]

    def _is_from_loader(self, batch: Mapping[str, Any]) -> bool:
        """Say whether all is read, and all tensors are those a loader checked, still unchanged."""
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        is_complete = all(key in batch for key in self.limits.required_keys)
        is_read = not self._unread_keys(batch)
        return is_complete and is_read and all(map(was_checked, tensors))

    def _check_by_all(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        fitted: list[Mapping[str, Any]] = []

        def check() -> tuple[str, int]:
            fitted.append(self._fitted(batch))
            return _digest(fitted[0]), fitted[0]["input_ids"].shape[1]

        facts = on_every_rank(check, gather_objects, otherwise=BatchError)
        lengths = sorted({length for _, length in facts})
        if self._run.needs_equal_lengths and len(lengths) > 1:
            raise BatchError(
                "Batches that do not come from a prepared DataLoader have sequences of "
                f"{', '.join(map(str, lengths))} tokens on different ranks, and the ranks of one "
                "layer's experts exchange pieces of one size (moe_token_dispatcher_type "
                "'allgather', or padding to capacity). Pad them to one length."
            )
        if self._some_replica_differs([digest for digest, _ in facts]):
            raise BatchError(
                "A batch that does not come from a prepared DataLoader differs between the ranks "
                "of one data-parallel replica, which have to work on the same rows. Pass the "
                "DataLoader to accelerator.prepare, or make the batch equal on those ranks."
            )
        return fitted[0]

    def _some_replica_differs(self, digests: list[str]) -> bool:
        """Say whether any replica's ranks differ, so that all ranks raise together."""
        return any(
            len({digests[rank] for rank in members}) > 1 for members in self._ranks.all_replicas
        )

    def _fitted(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        unread = self._unread_keys(batch)
        if unread:
            step = self._train_step
            raise BatchError(
                f"The batch has {', '.join(unread)}, which {step.name} does not read; it reads "
                f"{', '.join(step.batch_keys or ())}. Drop the rest from the batch, or give a "
                "custom_train_step_class that reads it."
            )
        checked = check_micro_batch(batch, self.limits)
        ids = batch["input_ids"]
        num_micro_batches = self._run.num_micro_batches
        # The batch is one piece here; filler rows make it divisible into micro-batches.
        shape = BatchShape(
            num_micro_batches=1,
            micro_batch_size=-(-ids.shape[0] // num_micro_batches) * num_micro_batches,
            pad_to_multiple_of=self._run.layout.sequence_multiple,
            **batch_rules(self._run.shape),
        )
        check_length(ids.shape[1], shape, self.limits)
        joined = join_micro_batches([checked], shape)
        part = RealPart(joined.num_real_rows, joined.longest)
        mark_real_part(joined.values["input_ids"], part)  # type: ignore[arg-type]
        return joined.values


def _digest(batch: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for key, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
