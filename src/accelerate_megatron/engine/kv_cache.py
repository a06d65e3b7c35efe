"""The keys and values of tokens that were read, for the tokens that come after them.

All rows of a batch end at the same slot: shorter prompts have padding before them, which is
hidden. A cache is allocated once, for the longest sequence it will hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Turn:
    """How rotary positions turn the first channels of queries and keys.

    Made once for all layers, where Megatron's own takes the cosines in every one of them.
    """

    cosine: torch.Tensor
    """[..., turned channels]."""
    sine: torch.Tensor
    """Like `cosine`, negative for the first half of the channels."""

    @classmethod
    def table(cls, frequencies: torch.Tensor, capacity: int, dtype: torch.dtype) -> Turn:
        """Return the turns of positions 0 to `capacity`, [capacity, turned channels].

        Args:
            frequencies: Inverse frequencies, [turned channels / 2].
            capacity: How many positions.
            dtype: Of queries and keys.
        """
        places = torch.arange(capacity, device=frequencies.device, dtype=frequencies.dtype)
        angles = torch.outer(places, frequencies)
        cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
        return cls(torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1))

    def at(self, positions: torch.Tensor) -> Turn:
        """Return, of a table, the turns of positions [b, s]: [s, b, 1, 1, turned channels]."""
        index = positions.t()
        return Turn(self.cosine[index][:, :, None, None], self.sine[index][:, :, None, None])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn [s, b, groups, heads, head_dim]; each channel with the one half of them away."""
        count = self.cosine.shape[-1]
        if count == x.shape[-1]:
            return torch.addcmul(x * self.cosine, x.roll(count // 2, -1), self.sine)
        turned, rest = torch.split(x, [count, x.shape[-1] - count], dim=-1)
        return torch.cat([self(turned), rest], dim=-1)


class RowCache(Protocol):
    """What a layer keeps of each row."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """As `KeyValueCache.select_rows`."""


@dataclass
class KeyValueCache:
    """What all layers of a model's chunks on one rank keep of one batch.

    Attributes:
        capacity: Slots of a row.
        dtype: Of the scores.
        padding: Bool [b, s], True at the slots before a row's first token; None: no row has any.
        by_distance: What is added to the scores of keys that are `capacity - 1`, ..., 1, 0 tokens
            before the query, [1, heads, 1, capacity]; None: nothing. Not together with padding.
        first: Of the tokens that are being read, the slot of the first one.
        last: And the slot after the last one.
        bias: Where one token is read, what is added to its scores, [1 or b, 1 or heads, 1, last].
        turn: Of the tokens that are being read, where positions are rotary.
        source_bias: What is added to the scores of an encoder's tokens, [b, 1, 1, s], or None.
        layers: What the layers keep.
    """

    capacity: int
    dtype: torch.dtype
    padding: torch.Tensor | None = None
    by_distance: torch.Tensor | None = None
    first: int = 0
    last: int = 0
    bias: torch.Tensor | None = None
    turn: Turn | None = None
    source_bias: torch.Tensor | None = None
    layers: list[RowCache] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Lay the padding out as attention adds it to scores, over all slots."""
        self._hiding: torch.Tensor | None = None
        if self.padding is not None:
            pads = F.pad(self.padding, (0, self.capacity - self.padding.shape[1]))
            self._hiding = hiding(pads, self.dtype)

    def begin(self, num_tokens: int) -> None:
        """Begin to read so many more tokens of each row."""
        self.first, self.last = self.last, self.last + num_tokens
        if self.by_distance is not None:
            # A copy: kernels for CUDA read 16 bytes at once, and refuse what begins between.
            self.bias = self.by_distance.narrow(3, self.capacity - self.last, self.last).clone()
        elif self._hiding is not None:
            self.bias = self._hiding.narrow(3, 0, self.last)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Let row i hold what row `rows[i]` held; rows may be repeated or left out.

        Args:
            rows: int64 [new rows].
        """
        if self._hiding is not None:
            self._hiding = self._hiding[rows]
        if self.source_bias is not None:
            self.source_bias = self.source_bias[rows]
        for layer in self.layers:
            layer.select_rows(rows)


def hiding(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what hides keys when it is added to scores: [b, 1, 1, keys], from bool [b, keys]."""
    nothing = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return nothing.masked_fill(is_hidden, -torch.inf)[:, None, None, :]


class SelfCache:
    """The keys and values of one layer, each [b, groups, capacity, its channels]."""

    def __init__(self, whole: KeyValueCache, *, scale: float, window: int | None) -> None:
        """Begin without any.

        Args:
            whole: What all layers share.
            scale: Of the scores.
            window: How many tokens a token looks at, itself included; None: all.
        """
        self._whole = whole
        self._scale = scale
        self._window = window
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        whole.layers.append(self)

    def attend(self, heads: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keep the keys and values of new tokens; return their context [s x b, heads x channels].

        The first call may bring any number of tokens, the later ones one each.

        Args:
            heads: By group of heads its queries, and behind them its key, [s, b, groups,
                queries + 1, head_dim].
            value: [s, b, groups, channels]; those of a head may be others than `head_dim`.
        """
        whole = self._whole
        if whole.turn is not None:
            heads = whole.turn(heads)
        num_queries = heads.shape[3] - 1
        query, key = heads.narrow(3, 0, num_queries), heads.select(3, num_queries)
        keys, values = self._keep(key, value)
        start = 0 if self._window is None else max(0, whole.last - self._window)
        if query.shape[0] > 1:
            return self._attend_prompt(query, keys, values)
        bias = whole.bias
        if start:
            keys, values = (x.narrow(2, start, whole.last - start) for x in (keys, values))
            bias = None if bias is None else bias[..., start:].clone()  # as in `begin`
        return _one_token(query[0], keys, values, bias, self._scale)

    def _keep(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values; return all there are, each [b, groups, tokens, channels]."""
        whole = self._whole
        if self._keys is None or self._values is None:
            _, rows, groups, _ = key.shape
            size = (rows, groups, whole.capacity)
            self._keys = key.new_empty(*size, key.shape[-1])
            self._values = value.new_empty(*size, value.shape[-1])
        count = whole.last - whole.first
        self._keys.narrow(2, whole.first, count).copy_(key.permute(1, 2, 0, 3))
        self._values.narrow(2, whole.first, count).copy_(value.permute(1, 2, 0, 3))
        return self._keys.narrow(2, 0, whole.last), self._values.narrow(2, 0, whole.last)

    def _attend_prompt(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        whole = self._whole
        mask = _prompt_mask(whole.last, whole.padding, self._window, query.device)
        q = query.flatten(2, 3).permute(1, 2, 0, 3)
        context = F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        return context.permute(2, 0, 1, 3).flatten(2).flatten(0, 1)

    def select_rows(self, rows: torch.Tensor) -> None:
        """As `KeyValueCache.select_rows`."""
        if self._keys is not None and self._values is not None:
            filled = self._whole.last
            self._keys = _with_rows(self._keys, rows, filled)
            self._values = _with_rows(self._values, rows, filled)


class SourceCache:
    """The keys and values that one layer makes of an encoder's tokens, once."""

    def __init__(
        self, whole: KeyValueCache, keys: torch.Tensor, values: torch.Tensor, *, scale: float
    ) -> None:
        """Keep `keys` and `values`, [b, heads, s, channels]."""
        self._whole = whole
        self._keys, self._values = keys.contiguous(), values.contiguous()
        self._scale = scale
        whole.layers.append(self)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Return the context of one token, [b, heads x channels]; `query` is [b, heads, 1, d]."""
        return _one_token(query, self._keys, self._values, self._whole.source_bias, self._scale)

    def select_rows(self, rows: torch.Tensor) -> None:
        """As `KeyValueCache.select_rows`."""
        self._keys, self._values = self._keys[rows], self._values[rows]


def _one_token(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return the context of one token, [b, heads x channels of the values].

    Heads that share keys are rows of one matrix product, so nothing is repeated.

    Args:
        query: [b, groups, queries, head_dim].
        keys: [b, groups, tokens, head_dim].
        values: [b, groups, tokens, channels].
        bias: Added to the scores, [1 or b, 1 or groups, 1, tokens], or None.
        scale: Of the scores.
    """
    context = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)
    return context.reshape(context.shape[0], -1)


def _with_rows(kept: torch.Tensor, rows: torch.Tensor, filled: int) -> torch.Tensor:
    """Return rows of a cache, [new rows, groups, capacity, channels]; unfilled slots are left."""
    chosen = kept.narrow(2, 0, filled)[rows]
    if len(rows) != kept.shape[0]:
        kept = kept.new_empty(len(rows), *kept.shape[1:])
    kept.narrow(2, 0, filled).copy_(chosen)
    return kept


def _prompt_mask(
    length: int, padding: torch.Tensor | None, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Return which slots each token of a prompt looks at, True = seen; None: all before it.

    Padding looks at itself: a row of nothing has no softmax, and its NaNs would reach the
    tokens that hide it.
    """
    is_long = window is not None and length > window
    if padding is None and not is_long:
        return None
    places = torch.arange(length, device=device)
    ago = places.unsqueeze(1) - places
    mask = ago >= 0
    if window is not None and is_long:
        mask &= ago < window
    return mask if padding is None else (mask & ~padding[:, None, None, :]) | (ago == 0)
