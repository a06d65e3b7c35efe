"""All ranks return, or all raise the same error: how a failure is described and raised again.

What one rank meets is told to the others as a `Failure`, a type and a text. How it travels is the
caller's: through the rendezvous store while there are no groups (`agreement`), by a collective
(`checkpoint`, `weights`, `training/batches`), or along with the batch (`data`). No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate_megatron import errors

T = TypeVar("T")

# Built-in exceptions that are made of one text. Others travel as RuntimeError.
_BUILT_IN: tuple[type[Exception], ...] = (
    AttributeError,
    FileNotFoundError,
    ImportError,
    ModuleNotFoundError,
    NotImplementedError,
    OSError,
    PermissionError,
    RuntimeError,
    TimeoutError,
    TypeError,
    ValueError,
)
_OURS: dict[str, type[Exception]] = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, Exception)
}
_KNOWN = {kind.__name__: kind for kind in _BUILT_IN} | _OURS


@dataclass(frozen=True)
class Failure:
    """An exception as it is told to other ranks."""

    kind: str
    """The name of a type that every rank has: one of `errors`, or a built-in one."""
    text: str

    @classmethod
    def of(cls, error: Exception, *, otherwise: type[Exception] | None = None) -> Failure:
        """Describe `error`.

        Args:
            error: What was raised.
            otherwise: The type of `errors` that stands for every error of another module; the
                text then names its own. None: built-in types stay, others become RuntimeError.
        """
        kind = type(error)
        known = _KNOWN if otherwise is None else _OURS
        if known.get(kind.__name__) is kind:
            return cls(kind.__name__, str(error))
        return cls((otherwise or RuntimeError).__name__, f"{kind.__name__}: {error}")

    def exception(self) -> Exception:
        """Return a new exception of this type and text."""
        return _KNOWN[self.kind](self.text)


def common_failure(
    failures: Mapping[int, Failure], num_ranks: int, *, name: str = "rank"
) -> Failure:
    """Return the one failure that all ranks raise, of those that some or all of them met.

    Args:
        failures: By rank; at least one. The first one's type is taken.
        num_ranks: How many ranks there are. Ranks are named unless all met the same.
        name: What a rank is called.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        ranks_of.setdefault(failure.text, []).append(rank)
    kind = failures[min(failures)].kind
    if len(ranks_of) == 1 and len(failures) == num_ranks:
        return Failure(kind, next(iter(ranks_of)))
    lines = [f"{name_ranks(ranks, name)}: {text}" for text, ranks in ranks_of.items()]
    return Failure(kind, "\n".join(lines))


def on_every_rank(
    action: Callable[[], T],
    gather: Callable[[Any], list[Any]],
    *,
    otherwise: type[Exception] | None = None,
) -> list[T]:
    """Run `action` on each rank; return what it returned, by rank. Every rank calls it.

    Args:
        action: This rank's part.
        gather: Returns every rank's value, in rank order, on every rank.
        otherwise: As in `Failure.of`.

    Raises:
        Exception: Some rank's part failed; the same on all ranks.
    """
    value, error, failure = _attempt(action, otherwise)
    told = gather((value, failure))
    failures = {rank: failure for rank, (_, failure) in enumerate(told) if failure is not None}
    if failures:
        raise common_failure(failures, len(told)).exception() from error
    return [value for value, _ in told]


def same_on_every_rank(
    resolve: Callable[[], T], gather: Callable[[Any], list[Any]], *, what: str
) -> T:
    """Return what `resolve` returns, which must be the same on each rank. Every rank calls it.

    Args:
        resolve: This rank's part: reads the arguments of a call and refuses bad ones.
        gather: Returns every rank's value, in rank order, on every rank.
        what: The call, for the message.

    Raises:
        Exception: Some rank's part failed; the same on all ranks.
        RanksDisagreeError: The ranks' values differ.
    """
    values = on_every_rank(resolve, gather)
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(repr(value), []).append(rank)
    if len(ranks_of) > 1:
        told = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in ranks_of.items())
        raise errors.RanksDisagreeError(
            f"{what} was called with different arguments ({told}). Call it alike on every rank."
        )
    return values[0]


def on_one_rank(
    action: Callable[[], T] | None,
    share: Callable[[Any], Any],
    *,
    otherwise: type[Exception] | None = None,
) -> T:
    """Run `action` on one rank and return its result on every rank. Every rank calls it.

    Args:
        action: What that rank does; None on the others.
        share: Returns that rank's value on every rank.
        otherwise: As in `Failure.of`.

    Raises:
        Exception: It failed; the same on all ranks.
    """
    value, error, failure = _attempt(action, otherwise) if action else (None, None, None)
    value, failure = share((value, failure))
    if failure is not None:
        raise failure.exception() from error
    result: Any = value
    return result  # type: ignore[no-any-return]


def _attempt(
    action: Callable[[], T], otherwise: type[Exception] | None
) -> tuple[T | None, Exception | None, Failure | None]:
    try:
        return action(), None, None
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        return None, error, Failure.of(error, otherwise=otherwise)


def name_ranks(ranks: Sequence[int], name: str = "rank") -> str:
    """Return "rank 3" or "ranks 0, 2-5, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(str(rank) for rank in run)
        for run in runs
    ]
    return f"{name}{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
