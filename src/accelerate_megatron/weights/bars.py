"""Progress bars: one for the job, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

from accelerate_megatron.log import is_logging_rank

Item = TypeVar("Item")


def progress_bar(
    items: Iterable[Item], title: str, *, total: int | None = None, shown: bool = True
) -> Iterable[Item]:
    """Return `items`, with a bar on stderr if this rank speaks for the job and it is a terminal."""
    if not (shown and is_logging_rank()):
        return items
    bar: Iterable[Item] = tqdm(items, desc=title, total=total, unit="tensor", disable=None)
    return bar
