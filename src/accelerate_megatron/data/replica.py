"""Where a rank stands among those that share its batches. Knows no Megatron: groups are handed in.

A *replica* is one copy of the model: the ranks that hold its tensor, pipeline and context slices.
All of them work on the same batch, which one of them, the fetching rank, takes from the
DataLoader.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class ReplicaPlace:
    """One rank's place in its replica and its replica's place among all of them."""

    dp_rank: int
    """Which replica this is."""
    dp_size: int
    """How many replicas there are."""
    dp_group: dist.ProcessGroup | None
    """The ranks in this rank's place in every replica, in the order of `dp_rank`. Used by the
    fetching ranks only, for which it holds all fetching ranks."""
    replica_group: dist.ProcessGroup | None
    """The ranks of this replica; None, or a group of one, when there is only this one."""
    fetch_rank: int
    """The global rank of the fetching rank of this replica."""
    is_fetching: bool
    """Whether this is the fetching rank."""

    @property
    def is_first_fetching(self) -> bool:
        """Whether this rank fetches for the first replica: it decides the order of the data."""
        return self.is_fetching and self.dp_rank == 0

    @property
    def has_peers(self) -> bool:
        """Whether other ranks work on the same batch, which then has to be sent."""
        return self.replica_group is not None and dist.get_world_size(self.replica_group) > 1
