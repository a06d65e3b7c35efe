"""The DataLoader that `prepare` returns, known to Accelerate while it is iterated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.state import GradientState

from accelerate_megatron.data.loader import MegatronDataLoader


class PreparedDataLoader(MegatronDataLoader):
    """`MegatronDataLoader` that is Accelerate's active one from its first batch to its last.

    `Accelerator.gather_for_metrics` asks the active loader how many rows are samples; an
    evaluation inside a training loop is active until it ends, then the training loader is
    again.
    """

    @property
    def remainder(self) -> int:
        """Rows of the current batch that only fill it up, on this replica."""
        return self.batch_size - self.num_real_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over one epoch; see `MegatronDataLoader.__iter__`."""
        state = GradientState()
        state._add_dataloader(self)
        try:
            yield from super().__iter__()
        finally:
            state._remove_dataloader(self)
