"""How the fetching ranks agree, step by step, on what every rank of the job does next.

Each of them has fetched a batch, has come to the end of its data, or has failed. One small
all-gather tells all of them; what then differs between the replicas is only the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron.data.broadcast import broadcast_value, pack_value, transport_device
from accelerate_megatron.data.collate import BatchTemplate, filler_batch, template_of
from accelerate_megatron.data.epoch import FetchedStep
from accelerate_megatron.data.replica import ReplicaPlace
from accelerate_megatron.errors import BatchError
from accelerate_megatron.failures import Failure, common_failure


@dataclass(frozen=True)
class Outcome:
    """What all ranks of a replica do in this step: raise, end (nothing is set), or yield."""

    values: dict[str, Any] | None = None
    num_real_rows: int = 0
    longest: int = 0
    longest_decoded: int = 0
    is_last: bool = False
    failure: Failure | None = None
    warning: str | None = None

    def parts(self) -> tuple[Any, ...]:
        """Return the fields in order, to be sent."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class _Report:
    """What one fetching rank tells the others about its step; whole numbers, to be gathered."""

    has_batch: int
    has_failed: int
    has_more: int
    has_template: int
    checksum: int


class Verdicts:
    """Brings the fetching ranks to one view of each step."""

    def __init__(self, replica: ReplicaPlace, device: torch.device) -> None:
        self._replica = replica
        self._device = device
        # The form of this replica's last batch, in this epoch or an earlier one.
        self._template: BatchTemplate | None = None

    def agree(self, fetched: FetchedStep) -> Outcome:
        """Return what this replica does in this step.

        Every fetching rank must call it. Communicates over the group of the fetching ranks.
        """
        if fetched.batch is not None:
            self._template = template_of(fetched.batch.values)
        reports = self._gather_reports(fetched)
        if any(report.has_failed for report in reports):
            return Outcome(failure=self._common_failure(fetched.error))
        if not any(report.has_batch for report in reports):
            return Outcome()
        disagreement = _order_disagreement(reports)
        if disagreement:
            return Outcome(failure=Failure(BatchError.__name__, disagreement))
        self._complete_templates(reports)
        is_last = not any(report.has_more for report in reports)
        warning = _early_end(reports)
        if fetched.batch is None:
            assert self._template is not None
            filler = filler_batch(self._template)
            return Outcome(values=filler, is_last=is_last, warning=warning)
        return Outcome(
            values=fetched.batch.values,
            num_real_rows=fetched.batch.num_real_rows,
            longest=fetched.batch.longest,
            longest_decoded=fetched.batch.longest_decoded,
            is_last=is_last,
            warning=warning,
        )

    def _gather_reports(self, fetched: FetchedStep) -> list[_Report]:
        mine = _Report(
            has_batch=fetched.batch is not None,
            has_failed=fetched.error is not None,
            has_more=fetched.has_more,
            has_template=self._template is not None,
            checksum=fetched.checksum,
        )
        if self._replica.dp_size == 1:
            return [mine]
        numbers = torch.tensor([int(getattr(mine, field.name)) for field in fields(mine)])
        numbers = numbers.to(transport_device(self._replica.dp_group, self._device))
        gathered = [torch.empty_like(numbers) for _ in range(self._replica.dp_size)]
        dist.all_gather(gathered, numbers, group=self._replica.dp_group)
        return [_Report(*row.tolist()) for row in gathered]

    def _common_failure(self, error: Exception | None) -> Failure:
        """Return one failure that every rank can raise, naming the replicas that failed."""
        mine = None if error is None else _describe(error, self._replica.fetch_rank)
        told: list[Failure | None] = [mine]
        if self._replica.dp_size > 1:
            told = [None] * self._replica.dp_size
            dist.all_gather_object(told, mine, group=self._replica.dp_group)
        failures = {rank: failure for rank, failure in enumerate(told) if failure is not None}
        return common_failure(failures, self._replica.dp_size, name="Data-parallel rank")

    def _complete_templates(self, reports: list[_Report]) -> None:
        """Give the form of a batch to replicas that never had one but have to make filler now."""
        if not any(not report.has_batch and not report.has_template for report in reports):
            return
        giver = next(rank for rank, report in enumerate(reports) if report.has_batch)
        assert self._replica.dp_group is not None
        template = broadcast_value(
            pack_value(self._template) if self._replica.dp_rank == giver else None,
            source=dist.get_global_rank(self._replica.dp_group, giver),
            group=self._replica.dp_group,
            device=self._device,
        )
        self._template = self._template or template


def _describe(error: Exception, rank: int) -> Failure:
    if not isinstance(error, BatchError):
        error = BatchError(
            f"Rank {rank} could not fetch a batch: {type(error).__name__}: {error}. The traceback "
            "is in that rank's output."
        )
    return Failure.of(error)


def _early_end(reports: list[_Report]) -> str | None:
    """Return what to warn of when data ended on some ranks before it could have.

    A rank whose own batches are used up has still seen the whole order; one that has not seen where
    this step begins was given less data than the others.
    """
    ended = [str(rank) for rank, report in enumerate(reports) if report.checksum < 0]
    if not ended or len(reports) == 1:
        return None
    return (
        f"The data ended on data-parallel rank {', '.join(ended)} while other ranks still have "
        "some. Each rank takes its part of one and the same dataset: the parts that these ranks "
        "would have taken of the rest are not used. They go on with batches that carry no weight."
    )


def _order_disagreement(reports: list[_Report]) -> str | None:
    seen = {rank: report.checksum for rank, report in enumerate(reports) if report.checksum >= 0}
    if len(set(seen.values())) <= 1:
        return None
    first = min(seen)
    others = [str(rank) for rank in seen if seen[rank] != seen[first]]
    return (
        f"The data-parallel ranks see different data, or the same in another order: rank {first} "
        f"and rank {', '.join(others)} differ. All ranks have to iterate the same dataset in the "
        "same order, of which each takes its own part: give all of them the whole dataset, and "
        "seed a sampler or a shuffle of your own alike on all ranks."
    )
