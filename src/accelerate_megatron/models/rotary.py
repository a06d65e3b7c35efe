"""Which rotary positions a config may ask for, and how many channels they turn. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_megatron.models.hf_config import required

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": (
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The supported `rope_type`s and the other entries of `rope_parameters` that each one reads."""
FEW_MODELS_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "yarn": ("rope_theta", "factor", "original_max_position_embeddings"),
}
"""Those that only some families may have: they scale the attention scores too."""


def rope_of(config: Any) -> dict[str, Any]:
    """Return a copy of `config.rope_parameters`; `rope_problems` comes first."""
    return dict(required(config, "rope_parameters"))


def rotary_channels_of(config: Any, head_dim: int) -> int | None:
    """Return how many channels of a head are turned, as transformers rounds; None: all."""
    fraction = required(config, "rope_parameters").get("partial_rotary_factor")
    return None if fraction in (None, 1.0) else int(head_dim * fraction)


def rope_problems(
    config: Any, head_dim: int, *, partial: bool = False, more_types: tuple[str, ...] = ()
) -> list[str]:
    """Say what the engine cannot represent of a config's positions; empty when it can all.

    Args:
        config: A Hugging Face config with `rope_parameters`.
        head_dim: Channels of one attention head.
        partial: Whether models of this type read `partial_rotary_factor`.
        more_types: Names in `FEW_MODELS_ROPE_FIELDS` that models of this type may have.
    """
    rope = required(config, "rope_parameters")
    owner = f"{type(config).__name__}.rope_parameters"
    rope_type = rope.get("rope_type")
    known = ROPE_FIELDS | {name: FEW_MODELS_ROPE_FIELDS[name] for name in more_types}
    if rope_type not in known:
        supported = ", ".join(sorted(known))
        return [f"{owner} has rope_type {rope_type!r}; supported are {supported}."]
    problems = _missing(rope, owner, rope_type, known[rope_type])
    fraction = rope.get("partial_rotary_factor")
    if fraction not in (None, 1.0) and not partial:
        problems.append(
            f"{owner} has partial_rotary_factor {fraction}: a {config.model_type} model turns all "
            "channels of a head; set it to 1.0 or leave it out."
        )
        return problems
    turned = rotary_channels_of(config, head_dim) or head_dim
    if turned % 2:
        problems.append(
            f"{type(config).__name__} turns {turned} channels of each head: rotary positions turn "
            "pairs of channels, so it must be even (head_dim times partial_rotary_factor)."
        )
    return problems


def _missing(
    rope: Mapping[str, Any], owner: str, rope_type: str, needed: tuple[str, ...]
) -> list[str]:
    missing = [name for name in needed if rope.get(name) is None]
    if not missing:
        return []
    return [
        f"{owner} lacks {', '.join(missing)}; rope_type {rope_type!r} needs {', '.join(needed)}."
    ]
