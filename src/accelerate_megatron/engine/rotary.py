"""Rotary frequencies as the Hugging Face config asks for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from accelerate_megatron.models.yarn import yarn_range


def inverse_frequencies(rope_parameters: Mapping[str, Any], channels: int) -> torch.Tensor:
    """Return the inverse frequencies, fp32 [channels / 2], in transformers' own arithmetic.

    Megatron's llama3 scaling knows the factor only, so the frequencies are computed here
    from all the numbers of the config.

    Args:
        rope_parameters: `rope_type` ("default", "linear", "llama3" or "yarn"), `rope_theta`, and
            for the scaled types the numbers of their scaling.
        channels: Channels of one attention head that are turned.

    Source: transformers 5.24, `modeling_rope_utils`, `_compute_linear_scaling_rope_parameters`,
        `_compute_llama3_parameters` and `_compute_yarn_parameters`.
    """
    exponents = torch.arange(0, channels, 2, dtype=torch.int64).to(torch.float32) / channels
    frequencies: torch.Tensor = 1.0 / (rope_parameters["rope_theta"] ** exponents)
    kind = rope_parameters["rope_type"]
    if kind == "linear":
        frequencies = frequencies / rope_parameters["factor"]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, rope_parameters)
    elif kind == "yarn":
        frequencies = _yarn(frequencies, rope_parameters, channels)
    return frequencies


def row_embeddings(position_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the angles by which Megatron turns each token, fp32 [s, b, 1, channels].

    Megatron's own are [s, 1, 1, channels], one for each place in the sequence.

    Args:
        position_ids: The position of each token, [b, s].
        frequencies: Inverse frequencies, [channels / 2].
    """
    angles = position_ids.t().to(frequencies.dtype)[..., None] * frequencies
    return torch.cat((angles, angles), dim=-1)[:, :, None, :]


def _llama3(frequencies: torch.Tensor, numbers: Mapping[str, Any]) -> torch.Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend those between."""
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    old_length = numbers["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    divided = frequencies / numbers["factor"]
    weight = (old_length / wavelength - low) / (high - low)
    blended = (1 - weight) * divided + weight * frequencies
    is_long = wavelength > old_length / low
    is_short = wavelength < old_length / high
    return torch.where(is_long, divided, torch.where(is_short, frequencies, blended))


def _yarn(frequencies: torch.Tensor, numbers: Mapping[str, Any], channels: int) -> torch.Tensor:
    """Keep the frequencies of the first pairs, divide those of the last, blend between."""
    low, high = yarn_range(numbers, channels)
    width = high - low if high != low else 0.001  # no division by zero
    pairs = torch.arange(channels // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((pairs - low) / width, 0, 1)
    divided: torch.Tensor = frequencies / numbers["factor"]
    return divided * (1 - kept) + frequencies * kept
