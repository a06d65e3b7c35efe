"""Lets all ranks of a job agree before their first collective: same settings, no error anywhere.

The ranks meet in the rendezvous store, which every process group has. A collective would hang when
one rank has already failed, or has built other groups than the rest; the store does neither.
What is *not* here: what a batch shows, which travels with the batch (`data`).
"""

from __future__ import annotations

import enum
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accelerate_megatron.errors import RanksDisagreeError
from accelerate_megatron.failures import Failure, common_failure, name_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Torch's own for collectives: between two agreements a rank may load a model, or wait for a disk.
_PATIENCE_SECONDS = 1800.0

# How much longer the other ranks wait for the outcome than rank 0 waits for them.
_GRACE_SECONDS = 10.0

_UNSET = "not set"


@dataclass(frozen=True)
class _Meeting:
    """One call of `agree`: who takes part and where in the store."""

    store: Store
    rank: int
    world_size: int
    name: str
    timeout: float

    def key(self, what: object) -> str:
        return f"{self.name}/{what}"


T = TypeVar("T")


def resolve_alike(
    name: str, resolve: Callable[[dict[str, Any]], T], timeout: float = _PATIENCE_SECONDS
) -> T:
    """Return what `resolve` does; if it fails on any rank, raise the same on all.

    Every rank must call it. It meets the others as `agree` does, in the default group's store.

    Args:
        name: What the ranks agree on.
        resolve: Is given a dictionary, and puts into it the settings that must be equal.
        timeout: Seconds until a rank that does not come is given up.
    """
    error: Exception | None = None
    settings: dict[str, Any] = {}
    result: Any = None
    try:
        result = resolve(settings)
    except Exception as caught:  # whatever it is, the other ranks wait to hear of it
        error = caught
    agree(
        settings,
        error,
        store=dist.distributed_c10d._get_default_store(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        name=name,
        timeout=timeout,
    )
    resolved: T = result
    return resolved


def agree(
    settings: Mapping[str, object],
    error: Exception | None,
    *,
    store: Store,
    rank: int,
    world_size: int,
    name: str,
    timeout: float = _PATIENCE_SECONDS,
) -> None:
    """Return on every rank, or raise the same error on every rank.

    Every rank must call it, also and above all one that has found an error. No collective is used.
    Calls with the same name may follow each other.

    Args:
        settings: What has to be the same everywhere. Numbers, strings and containers of them are
            compared by value, classes and functions by name, other objects by their type.
        error: What this rank would raise, or None.
        store: The rendezvous store of the job.
        rank: This rank.
        world_size: How many ranks call this.
        name: What the agreement is about; it names the keys in the store.
        timeout: Seconds until a rank that does not come is given up.

    Raises:
        RanksDisagreeError: A setting differs; the text names it, its values and the ranks.
        TimeoutError: A rank did not come in time; the text names it.
        Exception: Some rank has an error. Its type and text, with the ranks in front unless all
            ranks have the same one.
    """
    # The number of this call is kept in the store and not here, for a new store to begin anew.
    count = store.add(f"agreement/{name}/calls/{rank}", 1)
    meeting = _Meeting(store, rank, world_size, f"agreement/{name}/{count}", timeout)
    verdict = {
        "failure": None if error is None else asdict(Failure.of(error)),
        "settings": {key: _canonical_text(value) for key, value in settings.items()},
    }
    store.set(meeting.key(rank), json.dumps(verdict))
    came: list[int] = []
    if rank == 0:
        found, came = _collect(meeting)
        store.set(meeting.key("outcome"), json.dumps(found and asdict(found)))
    outcome = _read_outcome(meeting)
    if outcome is not None:
        store.set(meeting.key(f"read by {rank}"), "")
        # Rank 0 leaves last: where its process holds the store, the store ends with it, and the
        # others would find a lost connection instead of what was wrong.
        _wait(store, [meeting.key(f"read by {other}") for other in came], _GRACE_SECONDS)
        raise outcome.exception() from error


def _collect(meeting: _Meeting) -> tuple[Failure | None, list[int]]:
    """Wait for all verdicts; return what all ranks raise, and who came. Rank 0 only."""
    ranks = range(meeting.world_size)
    keys = [meeting.key(rank) for rank in ranks]
    missing = [keys.index(key) for key in _wait(meeting.store, keys, meeting.timeout)]
    if missing:
        return _missing(meeting, missing), [rank for rank in ranks if rank not in missing]
    verdicts = [json.loads(meeting.store.get(key)) for key in keys]
    return _judge(verdicts), list(ranks)


def _read_outcome(meeting: _Meeting) -> Failure | None:
    """Return what rank 0 says; the last rank to read it clears the store."""
    store, key = meeting.store, meeting.key("outcome")
    # Rank 0 may come as late as the others, and then waits for them in its turn.
    if _wait(store, [meeting.key(0)], meeting.timeout) or _wait(
        store, [key], meeting.timeout + _GRACE_SECONDS
    ):
        return _missing(meeting, [0])
    outcome = json.loads(store.get(key))
    if store.add(meeting.key("readers"), 1) == meeting.world_size:
        for what in (*range(meeting.world_size), "outcome", "readers"):
            store.delete_key(meeting.key(what))
    return None if outcome is None else Failure(**outcome)


def _missing(meeting: _Meeting, ranks: Sequence[int]) -> Failure:
    return Failure(
        TimeoutError.__name__,
        f"{name_ranks(ranks)} of {meeting.world_size} did not come within {meeting.timeout:g} s "
        "to compare settings before training. Look at their output: they have ended early, were "
        "never started, or are still loading.",
    )


def _wait(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait until all `keys` are in the store; return those that are not after `seconds`."""
    deadline = time.monotonic() + seconds
    for key in keys:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError:  # what every store of torch raises when its time is over
            return [key for key in keys if not store.check([key])]
    return []


def _judge(verdicts: Sequence[Mapping[str, Any]]) -> Failure | None:
    """Return what all ranks have to raise; None if all is well."""
    failures = {
        rank: Failure(**verdict["failure"])
        for rank, verdict in enumerate(verdicts)
        if verdict["failure"] is not None
    }
    settings: list[dict[str, str]] = [verdict["settings"] for verdict in verdicts]
    if failures:  # such a rank may not have come to all of its settings
        shared = set(settings[0]).intersection(*settings[1:])
        settings = [{key: of_rank[key] for key in of_rank if key in shared} for of_rank in settings]
    differences = _differences(settings)
    if not failures:
        if not differences:
            return None
        return Failure(
            RanksDisagreeError.__name__,
            f"The ranks of this job have different settings: {differences}. Start all ranks with "
            "the same script, arguments and environment.",
        )
    common = common_failure(failures, len(verdicts))
    if not differences:
        return common
    also = f"The ranks also have different settings: {differences}."
    return Failure(common.kind, f"{common.text}\n{also}")


def _differences(settings: Sequence[Mapping[str, str]]) -> str:
    """Return "tp_degree is 2 on ranks 0, 1 and 4 on rank 2; ..." for the settings that differ."""
    told = []
    for field in dict.fromkeys(field for of_rank in settings for field in of_rank):
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(settings):
            ranks_of.setdefault(of_rank.get(field, _UNSET), []).append(rank)
        if len(ranks_of) > 1:
            values = [f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items()]
            told.append(f"{field} is {', '.join(values[:-1])} and {values[-1]}")
    return "; ".join(told)


def _canonical_text(value: object) -> str:
    return json.dumps(_canonical(value), sort_keys=True)


def _canonical(value: object) -> object:
    """Return `value` as JSON can hold it, the same on every rank that has the same value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _canonical(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_canonical(item) for item in value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (PurePath, torch.dtype, torch.device)):
        return str(value)
    # Their texts hold addresses, which differ between ranks that agree.
    named: Any = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return f"{named.__module__}.{named.__qualname__}"
