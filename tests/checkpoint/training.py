"""What each rank runs in the tests of checkpoints: a loop that saves, stops, loads and goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, ragged_samples
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase

STEPS_PER_EPOCH = 5
SAMPLES = ragged_samples(STEPS_PER_EPOCH * GLOBAL_BATCH_ROWS - 3)
ONE_RANK = LayoutCase(1)
GPT2 = TinyModel("gpt2")
ADAMW = TinyOptimizer("adamw", {"lr": 1e-3, "weight_decay": 0.1})


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.steps = 0
        self.average = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.average = state["steps"], state["average"]


@dataclass(frozen=True)
class Run:
    """One run: what it trains, on which layout, and what it does with checkpoints."""

    layout: LayoutCase = ONE_RANK
    model: TinyModel = GPT2
    optimizer: TinyOptimizer = ADAMW
    plugin: dict[str, Any] = field(default_factory=dict)
    precision: str = "no"
    shuffle: bool = True
    steps: int = 8
    load: str | None = None
    save: dict[int, str] = field(default_factory=dict)
    """Updates done -> folder to save to."""
    save_loaded: str | None = None
    """Folder to save to right after loading."""
    project: str | None = None
    total_limit: int | None = None
    with_schedule: bool = True


@dataclass
class Outcome:
    """What one rank saw."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor] | None
    shards: dict[str, torch.Tensor]
    random: list[float]
    counter: dict[str, Any]
    rates: list[float]


def make(run: Run) -> tuple[Any, ...]:
    """Return accelerator, model, optimizer, loader and counter of a run."""
    torch.manual_seed(11)
    configuration = None
    if run.project is not None:
        configuration = ProjectConfiguration(
            project_dir=run.project,
            automatic_checkpoint_naming=True,
            total_limit=run.total_limit,
        )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=run.precision,
        project_config=configuration,
        megatron_lm_plugin=MegatronLMPlugin(
            num_micro_batches=run.layout.num_micro_batches,
            train_iters=20,
            lr_warmup_iters=2,
            **{**run.layout.plugin, **run.plugin},
        ),
    )
    hf_model = run.model.build()
    optimizer = run.optimizer.build(hf_model)
    loader = DataLoader(
        SAMPLES,
        batch_size=run.layout.micro_batch_rows,
        collate_fn=pad_samples,
        shuffle=run.shuffle,
    )
    parts = [hf_model, optimizer, loader]
    if run.with_schedule:
        parts.append(MegatronLMDummyScheduler(optimizer))
    model, prepared_optimizer, prepared_loader, *_ = accelerator.prepare(*parts)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, prepared_optimizer, prepared_loader, counter


def train(run: Run) -> Outcome:
    """Train on this rank; every rank of the layout calls it."""
    accelerator, model, optimizer, loader, counter = make(run)
    if run.load is not None:
        accelerator.load_state(None if run.load == "latest" else run.load)
    if run.save_loaded is not None:
        accelerator.save_state(run.save_loaded)
    losses, grad_norms, rates = [], [], []
    model.train()
    while counter.steps < run.steps:
        for batch in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            loss = model(**batch).loss
            optimizer.step()
            losses.append(loss.item())
            norm = model.session.grad_norm
            grad_norms.append(-1.0 if norm is None else float(norm))
            counter.steps += 1
            counter.average += torch.tensor([loss.item(), 1.0])
            if counter.steps in run.save:
                accelerator.save_state(run.save[counter.steps] or None)
            if counter.steps == run.steps:
                break
    return Outcome(
        losses,
        grad_norms,
        accelerator.get_state_dict(model),
        {name: value.detach().clone() for name, value in model.named_parameters()},
        [torch.rand(()).item()],
        counter.state_dict(),
        rates,
    )
