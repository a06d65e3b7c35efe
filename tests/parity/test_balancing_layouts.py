"""Gradients of each balancing loss are those of one plain process, however ranks cut the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.helpers.oracle import oracle_run
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.parity.test_parity import (
    SAMPLES,
    SCHEDULE,
    SGD,
    check_losses_and_norms,
    check_weights,
    oracle_case,
)
from tests.parity.training import LayoutCase, train

TP2 = {"tp_degree": 2, "sequence_parallelism": True}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP2 = {"expert_tensor_parallel_size": 2}
PP2_VP2 = {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}

LAYOUTS = [
    pytest.param(LayoutCase(1, num_micro_batches=1), id="1-one-micro-batch"),
    pytest.param(LayoutCase(1, num_micro_batches=8), id="1-eight-micro-batches-of-one-row"),
    pytest.param(LayoutCase(4, num_micro_batches=1), id="dp4"),
    pytest.param(LayoutCase(4, {**EP2, **ETP2, **TP2}), id="tp2-sp-dp2-ep2-etp2"),
    pytest.param(LayoutCase(4, {**CP2, **TP2}), id="cp2-tp2-sp"),
    pytest.param(LayoutCase(4, {**CP2, **EP2}), id="cp2-dp2-ep2"),
    pytest.param(LayoutCase(4, {**EP2, **PP2_VP2}), id="pp2-vp2-dp2-ep2"),
]
LOSSES = [
    pytest.param({"router_aux_loss_coef": 0.5}, {}, {}, id="aux-loss"),
    pytest.param({}, {"z_loss": 0.1}, {"moe_z_loss_coeff": 0.1}, id="z-loss"),
    pytest.param(
        {},
        {"sequence_loss": 1.0},
        {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "seq_aux_loss"},
        id="sequence-loss",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "oracle_losses", "arguments"), LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_balancing_gradients_do_not_depend_on_the_layout(
    layout: LayoutCase,
    config: dict[str, float],
    oracle_losses: dict[str, float],
    arguments: dict[str, Any],
) -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.0, **config}
    model = TinyModel("mixtral", tied=False, changes=changes)

    ranks = run_ranks(
        partial(train, other_megatron_args=arguments),
        layout,
        model,
        SGD,
        SAMPLES,
        SCHEDULE,
        num_ranks=layout.num_ranks,
    )

    # The steps of SGD are the gradients: weights that agree after five had equal ones.
    oracle = oracle_run(replace(oracle_case(model, SGD), **oracle_losses))
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)
