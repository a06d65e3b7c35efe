"""Encoders train as transformers' models do in one plain PyTorch process, with every head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase, OracleRun
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_encoders import encoder_samples, pad_encoder_samples
from tests.helpers.tiny_models import TinyModel, TinyOptimizer
from tests.parity.test_parity import check_losses_and_norms, check_weights
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase, RankResult, train

UPDATES = 5


@dataclass(frozen=True)
class Task:
    """A head and the labels it learns."""

    head: str
    labels: str
    changes: dict[str, Any] = field(default_factory=dict)


MASKED = Task("", "tokens", {"num_labels": 2})
SENTENCES = Task("-pretraining", "sentences")
CLASSES = Task("-classifier", "class", {"num_labels": 3})
NUMBERS = Task("-classifier", "number", {"num_labels": 1})
SEVERAL = Task("-classifier", "several", {"num_labels": 3})
TASKS = {
    "masked": MASKED,
    "sentences": SENTENCES,
    "classes": CLASSES,
    "numbers": NUMBERS,
    "several": SEVERAL,
}
LAYOUTS = {
    "1": LayoutCase(1),
    "tp2": LayoutCase(2, {"tp_degree": 2}),
    "tp4": LayoutCase(4, {"tp_degree": 4}),
    "pp2": LayoutCase(2, {"pp_degree": 2}, 4),
    "tp2-pp2": LayoutCase(4, {"tp_degree": 2, "pp_degree": 2}),
    "dp2": LayoutCase(2),
    "tp2-sp": LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True}),
    "dp2-dist-opt": LayoutCase(2, {"use_distributed_optimizer": True}),
    "tp2-pp2-sp": LayoutCase(4, {"tp_degree": 2, "pp_degree": 2, "sequence_parallelism": True}),
    "pp2-vp2": LayoutCase(2, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}, 4),
}
# With the eps of BERT's own training. With 1e-8, 22 of the 24 cases hold too; in the other two,
# megatron-bert's several labels at tp2, single gradients of the size of rounding are blown up to
# steps that put one matrix 1.2e-4 off instead of 1e-4.
ADAMW = TinyOptimizer("adamw", {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6})


def model_of(family: str, task: Task, **changes: Any) -> TinyModel:
    return TinyModel(f"{family}{task.head}", changes={**task.changes, **changes})


def samples_of(task: Task) -> list[dict[str, torch.Tensor]]:
    return encoder_samples(
        UPDATES * GLOBAL_BATCH_ROWS, task.labels, num_labels=task.changes.get("num_labels", 2)
    )


def oracle_of(model: TinyModel, task: Task) -> OracleRun:
    samples, rows = samples_of(task), GLOBAL_BATCH_ROWS
    batches = [
        pad_encoder_samples(samples[start : start + rows]) for start in range(0, len(samples), rows)
    ]
    return oracle_run(OracleCase(model=model, optimizer=ADAMW, batches=batches, clip=1.0))


def check(family: str, task: Task, layout: LayoutCase, **plugin: Any) -> list[RankResult]:
    model = model_of(family, task)
    ranks = run_ranks(
        partial(train, collate=pad_encoder_samples, **plugin),
        layout,
        model,
        ADAMW,
        samples_of(task),
        num_ranks=layout.num_ranks,
    )

    oracle = oracle_of(model, task)
    check_losses_and_norms(ranks, oracle)
    oracle = replace(oracle, weights=without_key_biases(oracle.weights))
    assert ranks[-1].weights is not None
    check_weights(without_key_biases(ranks[-1].weights), oracle)
    return ranks


def without_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what has no gradient but rounding, which AdamW divides by its own size."""
    return {name: value for name, value in weights.items() if not name.endswith("self.key.bias")}


FAST = [
    pytest.param("bert", SENTENCES, "tp2-pp2", id="bert-sentences-tp2-pp2"),
    pytest.param("bert", CLASSES, "tp2-sp", id="bert-classes-tp2-sp"),
    pytest.param("megatron-bert", MASKED, "tp2-pp2-sp", id="megatron-bert-masked-tp2-pp2-sp"),
    pytest.param("megatron-bert", SEVERAL, "dp2-dist-opt", id="megatron-bert-several-dp2"),
]


@pytest.mark.parametrize(("family", "task", "layout"), FAST)
def test_a_head_trains_as_in_plain_pytorch(family: str, task: Task, layout: str) -> None:
    check(family, task, LAYOUTS[layout])


FAMILIES = ("bert", "megatron-bert")
OTHERS = [
    pytest.param(family, task, layout, id=f"{family}-{name}-{layout}")
    for family in FAMILIES
    for name, task in TASKS.items()
    for layout in LAYOUTS
    if (family, task, layout) not in [tuple(case.values) for case in FAST]
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "task", "layout"), OTHERS)
def test_every_head_trains_as_in_plain_pytorch_on_every_layout(
    family: str, task: Task, layout: str
) -> None:
    check(family, task, LAYOUTS[layout])
