"""What each rank runs to save a model, and what it trained before."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMPlugin
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples


def save(
    model: TinyModel,
    plugin: dict[str, Any],
    folder: str,
    *,
    dtype: str = "no",
    updates: int = 0,
    with_save_model: bool = False,
    export_dtype: str | None = None,
    **settings: Any,
) -> None:
    """Prepare a model in `dtype`, train `updates` times with AdamW, and save it."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=dtype,
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, **plugin),
    )
    hf_model = model.build()
    if dtype == "bf16":
        # Not model.to(): that rounds the rotary frequencies too, as loading never does.
        for parameter in hf_model.parameters():
            parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.AdamW(hf_model.parameters(), lr=1e-2)
    loader = DataLoader(ragged_samples(8 * max(1, updates)), batch_size=2, collate_fn=pad_samples)
    prepared, _, loader = accelerator.prepare(hf_model, optimizer, loader)
    prepared.train()
    for _, batch in zip(range(updates), loader, strict=False):
        prepared(**batch)
    if with_save_model:
        accelerator.save_model(prepared, folder, **settings)
    else:
        accelerator.unwrap_model(prepared).save_pretrained(folder, dtype=export_dtype, **settings)
