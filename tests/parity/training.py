"""What each rank runs in a parity test: an ordinary Accelerate loop, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin, engine
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples

GLOBAL_BATCH_ROWS = 8


@dataclass(frozen=True)
class LayoutCase:
    """A layout, and how the global batch of 8 rows is cut up on it."""

    num_ranks: int
    plugin: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 2

    @property
    def micro_batch_rows(self) -> int:
        """Rows of one micro-batch."""
        model_size = self.plugin.get("tp_degree", 1) * self.plugin.get("pp_degree", 1)
        model_size *= self.plugin.get("context_parallel_size", 1)
        dp_size = self.num_ranks // model_size
        return GLOBAL_BATCH_ROWS // dp_size // self.num_micro_batches


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up and decay, in updates."""

    warmup: int = 2
    total: int = 10


@dataclass
class RankResult:
    """What one rank saw."""

    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor] | None
    shards: dict[Any, torch.Tensor]
    """This rank's parameters by local name."""


def train(
    layout: LayoutCase,
    model: TinyModel,
    optimizer: TinyOptimizer,
    samples: list[dict[str, torch.Tensor]],
    schedule: Schedule | None = None,
    mixed_precision: str = "no",
    by_place: bool = False,
    collate: Callable[..., Any] = pad_samples,
    **plugin: Any,
) -> RankResult:
    """Train one epoch over `samples` on this rank; every rank of the layout calls it.

    With `by_place`, `RankResult.shards` has canonical names and offsets as keys.
    """
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        megatron_lm_plugin=MegatronLMPlugin(
            num_micro_batches=layout.num_micro_batches,
            train_iters=schedule.total if schedule else None,
            lr_warmup_iters=schedule.warmup if schedule else None,
            **{**layout.plugin, **plugin},
        ),
    )
    hf_model = model.build()
    parts: list[Any] = [
        hf_model,
        optimizer.build(hf_model),
        DataLoader(samples, batch_size=layout.micro_batch_rows, collate_fn=collate),
    ]
    if schedule is not None:
        parts.append(MegatronLMDummyScheduler(parts[1]))
    prepared, prepared_optimizer, loader, *scheduler = accelerator.prepare(*parts)

    losses, grad_norms, rates = [], [], []
    prepared.train()
    for batch in loader:
        with accelerator.accumulate(prepared):
            rates.append(prepared_optimizer.param_groups[0]["lr"])
            outputs = prepared(**batch)
            accelerator.backward(outputs.loss)
            limit = accelerator.state.megatron_lm_plugin.gradient_clipping
            norm = accelerator.clip_grad_norm_(prepared.parameters(), limit)
            prepared_optimizer.step()
            for stepped in scheduler:
                stepped.step()
            prepared_optimizer.zero_grad()
        losses.append(outputs.loss.item())
        grad_norms.append(norm.item())
    return RankResult(
        losses,
        grad_norms,
        rates,
        accelerator.get_state_dict(prepared),
        _places(prepared) if by_place else _locals(prepared),
    )


def _locals(model: torch.nn.Module) -> dict[Any, torch.Tensor]:
    return {name: _held(value) for name, value in model.named_parameters()}


def _places(model: Any) -> dict[Any, torch.Tensor]:
    shards = engine.model_shards(model.session.chunks)
    return {(shard.name, shard.global_offset): shard.data.clone() for shard in shards}


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this rank holds of a parameter: under FSDP some of its rows."""
    value = parameter.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).clone()
