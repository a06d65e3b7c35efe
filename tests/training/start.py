"""Starts a tiny training on one rank, for tests of what its parts do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.data.loader import MegatronDataLoader
from accelerate_megatron.training.model import MegatronModel
from accelerate_megatron.training.optimizer import PreparedOptimizer
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, ragged_samples

SGD = TinyOptimizer("sgd", {"lr": 0.1})
TWO_LAYERS = TinyModel("gpt2", changes={"n_layer": 2})
WITH_DROPOUT = TinyModel(
    "gpt2", changes={"n_layer": 2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
)
TWO_LLAMA_LAYERS = TinyModel("llama", changes={"num_hidden_layers": 2})


@dataclass
class Started:
    """What `prepare` returned, and the model it was given."""

    accelerator: Accelerator
    model: MegatronModel
    optimizer: PreparedOptimizer
    loader: MegatronDataLoader
    hf_model: torch.nn.Module


def start(
    recipe: TinyModel = TWO_LAYERS,
    *,
    optimizer: TinyOptimizer = SGD,
    samples: list[dict[str, torch.Tensor]] | None = None,
    batch_size: int = 2,
    mixed_precision: str = "no",
    **plugin: Any,
) -> Started:
    """Prepare `recipe` with an optimizer and a loader; every rank calls it."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        megatron_lm_plugin=MegatronLMPlugin(**plugin),
    )
    hf_model = recipe.build()
    samples = ragged_samples(8) if samples is None else samples
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=pad_samples)
    parts = accelerator.prepare(hf_model, optimizer.build(hf_model), loader)
    return Started(accelerator, *parts, hf_model)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of this rank's parameters."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def gradient_of(started: Started, before: dict[str, torch.Tensor] | None, lr: float = 0.1) -> Any:
    """Return the Hugging Face gradients of one plain SGD update without clipping.

    Args:
        started: After the update.
        before: The Hugging Face weights before it, on the last rank.
        lr: The rate of the update.

    Returns:
        By name on the last rank, None elsewhere.
    """
    after = started.model.gather_state_dict()
    if after is None:
        return None
    assert before is not None
    return {name: (before[name] - after[name]) / lr for name in after}


def hf_loss(samples: list[dict[str, torch.Tensor]]) -> float:
    """Return the loss of all samples in one batch, as Hugging Face's own `TWO_LAYERS` has it."""
    model = TWO_LAYERS.build().eval()
    with torch.no_grad():
        return float(model(**pad_samples(samples)).loss)
