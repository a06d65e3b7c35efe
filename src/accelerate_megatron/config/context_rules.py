"""Context parallelism: what a sequence and the heads must divide into. No torch here."""

from __future__ import annotations

from accelerate_megatron.config.nearest import divisors, either
from accelerate_megatron.models.shape import ModelShape

CP_COMM_TYPES = ("all_gather", "a2a")
"""How context-parallel ranks see each other's tokens.

"all_gather": each rank gathers all keys and values. "a2a" (Ulysses): the ranks exchange, so that
each has all tokens of some heads.
"""


def context_world_problems(cp_comm_type: str) -> list[str]:
    """Return what is wrong with the way of communication; empty when nothing is."""
    if cp_comm_type in CP_COMM_TYPES:
        return []
    ring = (
        " A ring of point-to-point messages is not in this version."
        if "p2p" in cp_comm_type
        else ""
    )
    return [
        f"cp_comm_type is {cp_comm_type!r}; it must be "
        f"{' or '.join(repr(kind) for kind in CP_COMM_TYPES)}.{ring}"
    ]


def context_model_problems(
    shape: ModelShape, *, cp_size: int, tp_size: int, cp_comm_type: str, world_size: int
) -> list[str]:
    """Return why the sequence of `shape` cannot be split over context-parallel ranks."""
    if cp_size == 1:
        return []
    if shape.encoder_decoder is not None:
        return [
            f"context_parallel_size is {cp_size}, and a {shape.model_type} model cannot be spread "
            "over a sequence: its positions are numbers for pairs of tokens. Set "
            "context_parallel_size to 1, and use tp_degree with sequence_parallelism."
        ]
    if shape.encoder is not None:
        return [
            f"context_parallel_size is {cp_size}, but a {shape.model_type} model's batches are not "
            "cut along the sequence; set it to 1. sequence_parallelism does split activations."
        ]
    problems = []
    if shape.max_positions is not None and 2 * cp_size > shape.max_positions:
        problems.append(
            f"context_parallel_size={cp_size} cuts a sequence into {2 * cp_size} chunks, but the "
            f"model has {shape.max_positions} positions; set it to {shape.max_positions // 2} or "
            "less."
        )
    if cp_comm_type == "a2a":
        problems += _ulysses_problems(shape, cp_size, tp_size, world_size)
    return problems


def _ulysses_problems(shape: ModelShape, cp_size: int, tp_size: int, world_size: int) -> list[str]:
    heads = {
        "attention heads": shape.num_attention_heads,
        "key/value heads": shape.num_query_groups,
    }
    bad = {what: number for what, number in heads.items() if number % (tp_size * cp_size)}
    if not bad:
        return []
    listed = " and ".join(f"{number} {what}" for what, number in bad.items())
    working = [
        cp
        for cp in divisors(world_size // tp_size)
        if all(number % (tp_size * cp) == 0 for number in heads.values())
    ]
    choices = either(working)
    return [
        f"cp_comm_type='a2a' gives each rank whole heads, so tp_degree={tp_size} x "
        f"context_parallel_size={cp_size} = {tp_size * cp_size} must divide the model's {listed}. "
        f"With tp_degree={tp_size} on {world_size} ranks, context_parallel_size can be {choices}; "
        "or set cp_comm_type to 'all_gather', which splits no heads."
    ]


def sequence_length_problem(
    seq_length: int, *, cp_size: int, split_over: int, name: str = "seq_length"
) -> str | None:
    """Return why `seq_length` does not divide, or None when it does.

    Args:
        seq_length: Tokens of a row.
        cp_size: Context-parallel ranks.
        split_over: Tensor-parallel ranks that share a sequence: tp_size under sequence
            parallelism, else 1.
        name: What set it.
    """
    multiple = sequence_multiple(cp_size=cp_size, split_over=split_over)
    if seq_length % multiple == 0:
        return None
    below, above = seq_length // multiple * multiple, -(-seq_length // multiple) * multiple
    factors = [f"tp_degree={split_over} under sequence_parallelism"] if split_over > 1 else []
    if cp_size > 1:
        factors.insert(0, f"2 x context_parallel_size={cp_size}")
    choices = f"{below} or {above}" if below else str(above)
    return (
        f"{name}={seq_length} must be a multiple of {' times '.join(factors)}"
        f"{f' ({multiple})' if len(factors) > 1 or cp_size > 1 else ''}; set it to {choices}."
    )


def sequence_multiple(*, cp_size: int, split_over: int) -> int:
    """Return what a sequence is padded to a multiple of.

    Each context-parallel rank takes two chunks, one from the front and one from the back, and
    sequence parallelism cuts what a rank has over its tensor-parallel ranks.
    """
    return split_over if cp_size == 1 else 2 * cp_size * split_over
