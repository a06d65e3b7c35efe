"""bf16: parameters in bf16, gradients and the optimizer's copies in fp32, as Megatron does.

The oracle rounds in the same places between layers, not inside them: kernels, the order of
partial sums and the point where a tensor-parallel sum is rounded differ. One rounding to bf16
is off by 2^-9 of a value at most (0.2%). A loss averages over some hundred tokens, whose
errors are independent, so it is off by far less; gradients and updates have gone through
four layers both ways, each with a handful of such roundings.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import LinearSchedule, OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches, ragged_samples
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase, Schedule, train
from tests.training.start import start

SAMPLES = ragged_samples(4 * GLOBAL_BATCH_ROWS + 5)
ADAMW = TinyOptimizer("adamw", {"lr": 1e-3, "weight_decay": 0.1})
SGD = TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9})

# Five roundings in a row, in units of bf16's relative step 2^-8, over a loss of about 5 that
# is a mean over some hundred tokens: 5 * 5 * 2^-8 / sqrt(100). That is the first one's; the later
# ones are of weights that have gone their own way, on some CPUs further (6e-3) than on others.
FIRST_LOSS = 1e-2
LATER_LOSSES = 3e-2
# Relative; the norm adds up the squares of all gradients, whose errors are independent.
GRAD_NORM = 2e-2
# Of what the weights moved in all updates together. They come back in bf16: where the fp32 copies
# of the two sides lie on either side of a rounding boundary, a weight is off by a whole step,
# 2^-8 of itself, which is a third of what it moved; a gradient 2% off does that to one in
# twenty weights: sqrt(1/20) / 3, of which this is twice. AdamW gives every weight a step of about
# its rate whatever the gradient's size, so where that is near zero, noise decides the sign.
MOVED = {"sgd": 0.15, "adamw": 0.25}

LAYOUTS = [
    pytest.param(LayoutCase(1), id="1"),
    pytest.param(LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True}), id="tp2-sp"),
    pytest.param(LayoutCase(2, {"pp_degree": 2}, 4), id="pp2"),
    pytest.param(LayoutCase(2, {"use_distributed_optimizer": True}), id="dp2-dist-opt"),
    pytest.param(LayoutCase(4, {"tp_degree": 2, "pp_degree": 2}), id="tp2-pp2"),
]
MODELS = [
    pytest.param(TinyModel("gpt2"), id="gpt2"),
    pytest.param(TinyModel("llama", tied=False), id="llama"),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_training_is_plain_pytorchs_up_to_rounding(
    layout: LayoutCase, model: TinyModel
) -> None:
    optimizer = ADAMW if layout.num_ranks == 2 else SGD

    ranks = run_ranks(
        train,
        layout,
        model,
        optimizer,
        SAMPLES,
        Schedule(warmup=2, total=10),
        "bf16",
        num_ranks=layout.num_ranks,
    )

    oracle = oracle_run(
        OracleCase(
            model,
            optimizer,
            global_batches(SAMPLES, GLOBAL_BATCH_ROWS),
            schedule=LinearSchedule(warmup_steps=2, decay_steps=10),
            dtype="bf16",
            micro_batch_rows=layout.micro_batch_rows,
        )
    )
    assert len({tuple(rank.losses) for rank in ranks}) == 1
    losses, norms = torch.tensor(ranks[0].losses), torch.tensor(ranks[0].grad_norms)
    assert abs(losses[0] - oracle.losses[0]) <= FIRST_LOSS
    torch.testing.assert_close(losses, torch.tensor(oracle.losses), rtol=0, atol=LATER_LOSSES)
    torch.testing.assert_close(norms, torch.tensor(oracle.grad_norms), rtol=GRAD_NORM, atol=0)
    check_moves(model, ranks[-1].weights, oracle.weights, MOVED[optimizer.name])


def check_moves(
    model: TinyModel, weights: Any, wanted: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Compare how far all weights moved, in the L2 norm over the whole model."""
    start_weights = model.build().bfloat16().state_dict()
    error = moved = 0.0
    for name, value in weights.items():
        if "c_attn.bias" in name:  # key biases have no gradient but noise
            continue
        rounded = wanted[name].bfloat16().float()
        error += (value.float() - rounded).square().sum().item()
        moved += (rounded - start_weights[name].float()).square().sum().item()
    assert moved > 0
    assert (error / moved) ** 0.5 <= tolerance


def dtypes_in_training() -> Any:
    started = start(mixed_precision="bf16", use_distributed_optimizer=True)
    started.model(**next(iter(started.loader)))
    parameters = {value.dtype for value in started.model.parameters()}
    main = {p.dtype for group in started.optimizer.param_groups for p in group["params"]}
    loss = started.model(**next(iter(started.loader))).loss
    return parameters, main, loss.dtype


def test_bf16_means_bf16_parameters_with_fp32_copies_and_an_fp32_loss() -> None:
    for parameters, main, loss in run_ranks(dtypes_in_training, num_ranks=2):
        assert parameters == {torch.bfloat16}
        assert main == {torch.float32}
        assert loss == torch.float32
