"""What each rank runs to prepare an empty model, and what came of it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from accelerate_megatron import Accelerator, MegatronLMPlugin
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples


def prepare_empty(
    model: TinyModel | str,
    plugin: dict[str, Any],
    weights: str | None = None,
    mixed_precision: str = "no",
) -> tuple[float, dict[str, torch.Tensor] | None]:
    """Prepare a model on the meta device; return the loss of a batch and the state dict.

    Args:
        model: A recipe, or the folder that the config comes from.
        plugin: The layout.
        weights: Given to `prepare`.
        mixed_precision: Given to the Accelerator.
    """
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, **plugin),
    )
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config()
    with init_empty_weights():
        hf_model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(hf_model.parameters(), lr=1e-3)
    prepared, _ = accelerator.prepare(hf_model, optimizer, weights=weights)
    prepared.eval()
    loss = prepared(**pad_samples(ragged_samples(4))).loss.item()
    return loss, accelerator.get_state_dict(prepared)
