"""Buckets of distances, as transformers has them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.t5.modeling_t5 import T5Attention

from tests.helpers.ranks import run_ranks

DISTANCES = torch.arange(-600, 601)
SETTINGS = [
    {"num_buckets": number, "max_distance": distance, "looks_ahead": looks_ahead}
    for number, distance in ((32, 128), (8, 20), (4, 3))
    for looks_ahead in (False, True)
]


def buckets_of(settings: list[dict[str, Any]]) -> list[torch.Tensor]:
    from accelerate_megatron import engine

    engine.activate("cpu")
    from accelerate_megatron.engine.position_bias import distance_buckets

    return [distance_buckets(DISTANCES, **each) for each in settings]


def test_every_distance_is_in_the_bucket_of_transformers() -> None:
    (found,) = run_ranks(buckets_of, SETTINGS, num_ranks=1)

    for settings, ours in zip(SETTINGS, found, strict=True):
        looks_ahead = settings["looks_ahead"]
        wanted = T5Attention._relative_position_bucket(
            DISTANCES,
            bidirectional=looks_ahead,
            num_buckets=settings["num_buckets"],
            max_distance=settings["max_distance"],
        )
        assert torch.equal(ours, wanted), settings
        assert len(ours.unique()) == settings["num_buckets"] - looks_ahead
