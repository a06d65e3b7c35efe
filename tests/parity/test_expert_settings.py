"""How experts are run changes no number, but for dropped tokens; what cannot work is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from accelerate_megatron.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.parity.test_experts import EP2, ETP2, MIXTRAL, TP2, recipe
from tests.parity.test_parity import (
    SAMPLES,
    SCHEDULE,
    SGD,
    check_losses_and_norms,
    check_weights,
    expected,
)
from tests.parity.training import LayoutCase, RankResult, train

SLOW = pytest.mark.slow
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
GROUPED = {"moe_grouped_gemm": True}
# Each token goes to 2 of 4 experts: twice the even share holds all tokens.
WIDE = {"moe_expert_capacity_factor": 2.0}
NARROW = {"moe_expert_capacity_factor": 0.5}
PADDED = {"moe_pad_expert_input_to_capacity": True}
LENGTH = {"seq_length": 24}


def run(
    layout: LayoutCase, arguments: dict[str, Any], model: TinyModel = MIXTRAL, **settings: Any
) -> list[RankResult]:
    return run_ranks(
        partial(train, other_megatron_args=arguments, **settings),
        layout,
        model,
        SGD,
        SAMPLES,
        SCHEDULE,
        num_ranks=layout.num_ranks,
    )


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        pytest.param(LayoutCase(2, {**EP2, **LENGTH}), ALLGATHER, id="allgather", marks=SLOW),
        pytest.param(
            LayoutCase(4, {**TP2, **EP2, **ETP2, **LENGTH}), ALLGATHER, id="allgather-etp2"
        ),
        pytest.param(LayoutCase(2, EP2), GROUPED, id="grouped", marks=SLOW),
        pytest.param(LayoutCase(4, {**TP2, **EP2, **ETP2}), GROUPED, id="grouped-etp2"),
        pytest.param(LayoutCase(2, EP2), WIDE, id="capacity", marks=SLOW),
        pytest.param(LayoutCase(2, {"use_custom_fsdp": True}), {}, id="fsdp", marks=SLOW),
        pytest.param(
            LayoutCase(2, {**EP2, "recompute_granularity": "selective"}),
            {"recompute_modules": ["moe"]},
            id="recomputed",
        ),
        pytest.param(
            LayoutCase(
                2, {**EP2, "optimizer_cpu_offload": True, "use_distributed_optimizer": True}
            ),
            {},
            id="offloaded",
        ),
        pytest.param(LayoutCase(4, {**EP2, "context_parallel_size": 2}), {}, id="cp2-ep2"),
        pytest.param(LayoutCase(2, {**EP2, **LENGTH}), {**WIDE, **PADDED}, id="padded-capacity"),
        pytest.param(
            LayoutCase(2, {**TP2, **EP2}),
            {**WIDE, **PADDED, **ALLGATHER, **GROUPED},
            id="padded-capacity-allgather-grouped",
        ),
    ],
)
def test_training_equals_plain_pytorch_however_experts_are_run(
    layout: LayoutCase, arguments: dict[str, Any]
) -> None:
    ranks = run(layout, arguments)

    oracle = expected(MIXTRAL, SGD)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)


@SLOW
def test_a_rank_that_holds_no_row_of_a_parameter_trains_the_others() -> None:
    # The gate of the shared expert has one row: fully sharded, it is on the first rank alone.
    model = recipe("qwen2_moe")

    ranks = run(LayoutCase(2, {"use_custom_fsdp": True}), {}, model)

    oracle = expected(model, SGD)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)


def test_in_bf16_grouped_experts_are_sequential_ones_bit_for_bit() -> None:
    layout = LayoutCase(2, EP2)

    sequential, grouped = (
        run(layout, arguments, mixed_precision="bf16") for arguments in ({}, GROUPED)
    )

    for one, other in zip(sequential, grouped, strict=True):
        assert one.losses == other.losses
        assert one.grad_norms == other.grad_norms
        assert one.shards.keys() == other.shards.keys()
        assert all(torch.equal(one.shards[name], other.shards[name]) for name in one.shards)


def test_fully_sharded_experts_in_bf16_are_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"use_custom_fsdp is on and mixed_precision is 'b.*work: use_custom_fsdp=False, use_"
        r"distributed_optimizer=True; or mixed_precision='no'\.",
    ):
        run(LayoutCase(2, {"use_custom_fsdp": True}, 1), {}, mixed_precision="bf16")


def test_a_narrow_capacity_drops_tokens_by_the_policy_asked_for() -> None:
    layout = LayoutCase(1)

    lowest = run(layout, NARROW)[0].losses[0]
    last = run(layout, {**NARROW, "moe_token_drop_policy": "position"})[0].losses[0]

    whole = expected(MIXTRAL, SGD).losses[0]
    assert min(abs(lowest - whole), abs(last - whole), abs(lowest - last)) > 1e-4


def test_the_correction_bias_moves_by_its_rate_when_asked_to() -> None:
    model = recipe("glm4_moe")

    ranks = run(LayoutCase(2, EP2), {"moe_router_bias_update_rate": 0.001}, model)

    weights, before = ranks[-1].weights, model.build().state_dict()
    assert weights is not None
    names = [name for name in weights if name.endswith("e_score_correction_bias")]
    assert len(names) == 3
    for name in names:
        steps = (weights[name] - before[name]) / 0.001
        # Each of the five updates moves each expert's bias up, down or not at all.
        assert steps.abs().max() <= 5.01
        assert steps.abs().max() >= 0.99
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("model", "plugin", "arguments", "message"),
    [
        pytest.param(
            MIXTRAL,
            EP2,
            ALLGATHER,
            r"moe_token_dispatcher_type='allgather' needs seq_length: "
            r"expert_model_parallel_size=2 .* Set seq_length, or.*Nearest that works on 2 ranks: "
            r"tp_degree=1, pp_degree=1, expert_model_parallel_size=1; or ",
            id="allgather-over-replicas",
        ),
        pytest.param(
            MIXTRAL,
            EP2,
            {**WIDE, **PADDED},
            r"moe_pad_expert_input_to_capacity=True needs seq_length",
            id="padding-over-replicas",
        ),
        pytest.param(
            MIXTRAL,
            {**TP2, "use_custom_fsdp": True},
            {},
            r"use_custom_fsdp is on and tp_degree is 2, whose ranks hold replicas of the experts",
            id="fsdp-tp",
        ),
        pytest.param(
            recipe("glm4_moe"),
            {"use_custom_fsdp": True},
            {},
            r"use_custom_fsdp is on and the model's routers have a correction bias",
            id="fsdp-correction-bias",
        ),
        pytest.param(
            MIXTRAL,
            {},
            PADDED,
            r"moe_pad_expert_input_to_capacity=True has no effect without moe_expert_capacity_fac",
            id="padding-without-capacity",
        ),
        pytest.param(
            MIXTRAL,
            {},
            {"moe_expert_capacity_factor": -1.0},
            r"moe_expert_capacity_factor is -1\.0; it must be above 0",
            id="capacity",
        ),
        pytest.param(
            MIXTRAL,
            {},
            {"moe_router_bias_update_rate": 0.1},
            r"moe_router_bias_update_rate is 0\.1, but the router of a mixtral model has no corr",
            id="no-bias",
        ),
        pytest.param(
            MIXTRAL,
            {},
            {"moe_router_load_balancing_type": "seq_aux_loss"},
            r"moe_router_load_balancing_type='seq_aux_loss' has no effect without a coefficient",
            id="no-coefficient",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    model: TinyModel, plugin: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    layout = LayoutCase(2, plugin, 1)

    with pytest.raises(ConfigurationError, match=message):
        run(layout, arguments, model)
