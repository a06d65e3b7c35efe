"""YaRN rotary positions: the numbers a config gives for them. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    """Return the factor on the cosines and sines of turned channels.

    Args:
        rope: `rope_parameters` of rope_type "yarn".

    Source: transformers 5.24, modeling_rope_utils.py, _compute_yarn_parameters.
    """
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    factor, mscale, all_dims = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dims:
        return float(yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dims))
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return by how much longer positions raise attention scores; 1 where they are not longer.

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.4.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_range(rope: Mapping[str, Any], channels: int) -> tuple[float, float]:
    """Return between which channel pairs frequencies go over from kept to divided.

    Args:
        rope: `rope_parameters` of rope_type "yarn".
        channels: Channels of one head that are turned.
    """
    low, high = (
        _pair_of(rotations, rope, channels)
        for rotations in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, channels - 1)


def _pair_of(rotations: float, rope: Mapping[str, Any], channels: int) -> float:
    """Return the pair of channels that turns `rotations` times over the original positions."""
    length = rope["original_max_position_embeddings"] / (rotations * 2 * math.pi)
    return channels * math.log(length) / (2 * math.log(rope["rope_theta"]))
