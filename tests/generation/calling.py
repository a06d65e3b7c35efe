"""What the ranks of a generation test run, and what transformers says to the same prompts."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_megatron.errors import GenerationError
from tests.helpers.tiny_models import VOCAB_SIZE, TinyModel
from tests.training.start import start

Batch = tuple[torch.Tensor, torch.Tensor]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp_degree": 2}),
    "pp2": (2, {"pp_degree": 2}),
    "tp2-pp2": (4, {"tp_degree": 2, "pp_degree": 2}),
}
"""By name: ranks, and fields of the plugin."""


def prompts(*lengths: int, side: str = "left", seed: int = 3) -> Batch:
    """Return prompts of these lengths and their mask, padded with 0 on one side."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    return ids, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)


def reference(recipe: TinyModel, batch: Batch, **asked: Any) -> torch.Tensor:
    """Return what transformers' `generate` gives, with its cache."""
    model = recipe.build().eval()
    settings = {"do_sample": False, "use_cache": True, "pad_token_id": 0, **asked}
    tokens: torch.Tensor = model.generate(batch[0], attention_mask=batch[1], **settings)
    return tokens


def generated(
    recipe: TinyModel,
    plugin: dict[str, Any],
    calls: list[tuple[Batch, dict[str, Any]]],
    mixed_precision: str = "no",
) -> list[torch.Tensor]:
    """Return what each call gives on this rank."""
    model = start(recipe, mixed_precision=mixed_precision, **plugin).model
    return [model.megatron_generate(*batch, **asked) for batch, asked in calls]


def refusals(
    recipe: TinyModel, plugin: dict[str, Any], calls: list[tuple[Batch, dict[str, Any]]]
) -> list[str]:
    """Return what each call raises on this rank."""
    model = start(recipe, **plugin).model
    return [refusal_of(model, batch, asked) for batch, asked in calls]


def refusal_of(model: Any, batch: Any, asked: dict[str, Any]) -> str:
    """Return the text of the error of one call, or an empty string."""
    try:
        model.megatron_generate(*batch, **asked)
    except GenerationError as error:
        return str(error)
    return ""
