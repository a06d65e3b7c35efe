"""What each rank runs for one family: logits, one update, and the weights back again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMPlugin, engine
from tests.helpers.tiny_models import TinyModel, pad_samples


@dataclass
class FamilyResult:
    """What one rank saw."""

    logits: torch.Tensor | None
    """[rows, s, vocabulary] before the update, on the last stage."""
    exported: dict[str, torch.Tensor] | None
    """The state dict before the update, on the last rank."""
    loss: float
    grad_norm: float
    updated: dict[str, torch.Tensor] | None


def one_update(
    model: TinyModel,
    plugin: dict[str, Any],
    samples: list[dict[str, torch.Tensor]],
    mixed_precision: str = "no",
) -> FamilyResult:
    """Prepare the model, look at its logits, and do one update on all samples with plain SGD."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, **plugin),
    )
    hf_model = model.build()
    optimizer = torch.optim.SGD(hf_model.parameters(), lr=0.1)
    layout_size = plugin.get("tp_degree", 1) * plugin.get("pp_degree", 1)
    rows = len(samples) // 2 // (accelerator.num_processes // layout_size)
    loader = DataLoader(samples, batch_size=rows, collate_fn=pad_samples)
    prepared, _, loader = accelerator.prepare(hf_model, optimizer, loader)
    exported = accelerator.get_state_dict(prepared)

    session = prepared.session
    prepared.eval()
    logits = engine.model_logits(session.chunks, session.run, pad_samples(samples)["input_ids"])
    prepared.train()
    (batch,) = list(loader)
    loss = prepared(**batch).loss.item()
    return FamilyResult(
        logits, exported, loss, session.grad_norm, accelerator.get_state_dict(prepared)
    )
