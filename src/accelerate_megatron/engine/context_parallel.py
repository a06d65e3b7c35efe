"""One sequence over several ranks: who has which tokens, and how they come together again.

A sequence is cut into 2 x cp chunks, and context-parallel rank r holds chunks r and
2 x cp - 1 - r, one from the front and one from the back. Under a causal mask a token costs the
more the later it stands, and so each rank gets the same work.

The tensors here are sequence first, as Megatron's activations are, unless a dim is given.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
)


def chunk_indices(rank: int, size: int) -> tuple[int, int]:
    """Return which two of the 2 x `size` chunks of a sequence `rank` holds, in order."""
    return rank, 2 * size - 1 - rank


def take_slice(whole: torch.Tensor, *, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return the two chunks of `whole` along `dim` that `rank` of `size` holds, joined.

    Raises:
        ValueError: The sequence does not divide into 2 x `size` chunks.
    """
    if whole.shape[dim] % (2 * size):
        raise ValueError(
            f"A sequence of {whole.shape[dim]} tokens cannot be split over {size} "
            f"context-parallel ranks: it must be a multiple of {2 * size}."
        )
    chunks = whole.chunk(2 * size, dim)
    return torch.cat([chunks[index] for index in chunk_indices(rank, size)], dim)


def gather_sequence(
    mine: torch.Tensor, group: dist.ProcessGroup, *, grads_are_partial: bool
) -> torch.Tensor:
    """Return all tokens in their order, [s, ...], from each rank's, [s / cp, ...].

    Every rank of `group` calls it.

    Args:
        mine: This rank's two chunks.
        group: The context-parallel ranks.
        grads_are_partial: True where each rank goes on with work of its own, so that the
            gradients of the ranks add up; False where all do the same.
    """
    gathered = gather_from_sequence_parallel_region(
        mine.contiguous(), tensor_parallel_output_grad=grads_are_partial, group=group
    )
    return _to_order(gathered, group.size())


def heads_for_tokens(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Give away heads and get tokens (Ulysses): [s / cp, b, h, d] -> [s, b, h / cp, d].

    Every rank of `group` calls it; the tokens come in their order.
    """
    size = group.size()
    tokens, rows, heads, channels = mine.shape
    parts = mine.view(tokens, rows, size, heads // size, channels).permute(2, 0, 1, 3, 4)
    received = all_to_all(group, parts.reshape(size * tokens, rows, heads // size, channels))
    return _to_order(received, size)


def tokens_for_heads(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Undo `heads_for_tokens`: [s, b, h / cp, d] -> [s / cp, b, h, d]."""
    size = group.size()
    received: torch.Tensor = all_to_all(group, _to_ranks(whole, size))
    tokens = whole.shape[0] // size
    parts = received.view(size, tokens, *whole.shape[1:]).permute(1, 2, 0, 3, 4)
    return parts.flatten(2, 3)


def chunks_with_bounds(
    mine: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield this rank's two chunks of `mine` [s / cp, ...] with their bounds in the sequence."""
    length = mine.shape[0] // 2
    for chunk, index in zip(mine.chunk(2), chunk_indices(group.rank(), group.size()), strict=True):
        yield chunk, index * length, (index + 1) * length


def _to_order(by_rank: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder chunks from rank after rank to their order in the sequence."""
    chunks = by_rank.chunk(2 * size)
    held_by = [index for rank in range(size) for index in chunk_indices(rank, size)]
    places = {index: place for place, index in enumerate(held_by)}
    return torch.cat([chunks[places[index]] for index in range(2 * size)])


def _to_ranks(in_order: torch.Tensor, size: int) -> torch.Tensor:
    """Undo `_to_order`."""
    chunks = in_order.chunk(2 * size)
    held_by = [index for rank in range(size) for index in chunk_indices(rank, size)]
    return torch.cat([chunks[index] for index in held_by])
