"""The keys and values of tokens that were read, for the tokens that come after them.

All rows of a batch end at the same slot: shorter prompts have padding before them, which is
hidden. A cache is allocated once, for the longest sequence it will hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Turn:
    """How rotary positions turn the first channels of queries and keys.

    Made once for all layers, where Megatron's own takes the cosines in every one of them.
    """

    cosine: torch.Tensor
    """[s, b or 1, 1, turned channels]."""
    sine: torch.Tensor
    """Like `cosine`, negative for the first half of the channels."""

    @classmethod
    def by(cls, angles: torch.Tensor, dtype: torch.dtype) -> Turn:
        """Return the turn by `angles` [s, b or 1, 1, turned channels / 2]."""
        cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
        return cls(torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn heads [s, b, heads, head_dim]; each channel with the one half of them away."""
        count = self.cosine.shape[-1]
        turned, rest = x[..., :count], x[..., count:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * self.cosine + torch.cat([second, first], dim=-1) * self.sine
        return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)


@dataclass
class KeyValueCache:
    """What all layers of a model's chunks on one rank keep of one batch.

    Attributes:
        capacity: Slots of a row.
        padding: Bool [b, s], True at the slots before a row's first token; None: no row has any.
        length: Slots that all layers have filled.
        turn: Of the tokens that are being read, where positions are rotary.
        layers: By layer, its part; made by `add_layer`.
    """

    capacity: int
    padding: torch.Tensor | None = None
    length: int = 0
    turn: Turn | None = None
    layers: list[LayerCache] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Lay the padding out as attention reads it, True = seen, over all slots."""
        self.seen: torch.Tensor | None = None
        if self.padding is not None:
            pads = F.pad(self.padding, (0, self.capacity - self.padding.shape[1]))
            self.seen = ~pads[:, None, None, :]

    def add_layer(self) -> LayerCache:
        """Return the part of one more layer."""
        self.layers.append(LayerCache(self))
        return self.layers[-1]

    def select_rows(self, rows: torch.Tensor) -> None:
        """Let row i hold what row `rows[i]` held; rows may be repeated or left out.

        Args:
            rows: int64 [new rows].
        """
        if self.seen is not None:
            self.seen = self.seen[rows]
        for layer in self.layers:
            layer.select_rows(rows)


class LayerCache:
    """The keys and values of one layer, each [b, groups, capacity, its channels]."""

    def __init__(self, whole: KeyValueCache) -> None:
        self._whole = whole
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Keep the keys and values of new tokens; return their context [s, b, heads, channels].

        The first call may bring any number of tokens, the later ones one each.

        Args:
            query: [s, b, heads, head_dim].
            key: [s, b, groups, head_dim].
            value: [s, b, groups, channels]; those of a head may be others than `head_dim`.
            scale: Of the scores.
            window: How many tokens a token looks at, itself included; None: all.
        """
        if self._whole.turn is not None:
            heads = query.shape[2]
            turned = self._whole.turn(torch.cat([query, key], dim=2))
            query, key = turned[:, :, :heads], turned[:, :, heads:]
        first, last = self._whole.length, self._whole.length + query.shape[0]
        keys, values = self._keep(key, value, first, last)
        seen = self._whole.seen
        start = 0 if window is None else max(0, last - window)
        if query.shape[0] == 1:
            mask = None if seen is None else seen[..., start:last]
            keys, values = keys[:, :, start:last], values[:, :, start:last]
            return _one_token(query, keys, values, mask, scale)
        mask = _prompt_mask(last, None if seen is None else seen[..., :last], window, query.device)
        q = query.permute(1, 2, 0, 3)
        context = F.scaled_dot_product_attention(
            q,
            keys[:, :, :last],
            values[:, :, :last],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        return context.permute(2, 0, 1, 3)

    def select_rows(self, rows: torch.Tensor) -> None:
        """As `KeyValueCache.select_rows`."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]

    def _keep(
        self, key: torch.Tensor, value: torch.Tensor, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._keys is None or self._values is None:
            capacity = self._whole.capacity
            self._keys, self._values = (
                x.new_empty(x.shape[1], x.shape[2], capacity, x.shape[3]) for x in (key, value)
            )
        self._keys[:, :, first:last] = key.permute(1, 2, 0, 3)
        self._values[:, :, first:last] = value.permute(1, 2, 0, 3)
        return self._keys, self._values


def _one_token(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the context of one token, [1, b, heads, channels of the values].

    Heads that share keys are rows of one matrix product, so nothing is repeated.

    Args:
        query: [1, b, heads, head_dim].
        keys: [b, groups, tokens, head_dim].
        values: [b, groups, tokens, channels].
        mask: Bool [b, 1, 1, tokens], True = seen, or None.
        scale: Of the scores.
    """
    _, rows, heads, channels = query.shape
    groups = keys.shape[1]
    q = query.reshape(rows, groups, heads // groups, channels)
    context = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return context.reshape(1, rows, heads, values.shape[-1])


def _prompt_mask(
    length: int, seen: torch.Tensor | None, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Return which slots each token of a prompt looks at, True = seen; None: all before it.

    Padding looks at itself: a row of nothing has no softmax, and its NaNs would reach the
    tokens that hide it.
    """
    is_long = window is not None and length > window
    if seen is None and not is_long:
        return None
    places = torch.arange(length, device=device)
    ago = places.unsqueeze(1) - places
    mask = ago >= 0
    if window is not None and is_long:
        mask &= ago < window
    return mask if seen is None else (mask & seen) | (ago == 0)


def attach(cores: Iterable[torch.nn.Module], cache: KeyValueCache | None) -> None:
    """Give each core attention, in the order of the layers, its part of `cache`; None: none."""
    for core in cores:
        core.cache = None if cache is None else cache.add_layer()  # type: ignore[assignment]
