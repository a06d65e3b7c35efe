"""What multi-latent attention looks like. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose queries, keys and values are projected from vectors of low rank.

    A head's queries and keys have a part from their low-rank vectors (content) and a part that
    carries the position; the latter is one for all heads of the keys. All sizes are channels.
    """

    query_rank: int | None
    """Of the vector that queries come from; None: they come from the hidden state itself."""
    key_value_rank: int
    """Of the vector that the content of keys, and the values, come from."""
    content_channels: int
    """Of a head's queries and keys, without position."""
    position_channels: int
    """Of a head's queries and keys, turned by rotary positions."""
    interleaved: bool
    """Whether neighbouring channels are turned as pairs in the weights, or halves."""
    position_scale: float = 1.0
    """Factor on the turned channels of queries and of keys (YaRN's attention factor)."""
    norm_epsilon: float = 1e-6
    """Of the norms on the low-rank vectors."""

    @property
    def key_channels(self) -> int:
        """Channels of a head's queries and keys."""
        return self.content_channels + self.position_channels
