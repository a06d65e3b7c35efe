"""Recomputation changes what is kept, never a number: bit-equal losses, norms and weights."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.training.gpt import token_loss
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import (
    TinyModel,
    TinyOptimizer,
    global_batches,
    ragged_samples,
)
from tests.parity.training import LayoutCase, RankResult, train

OPTIMIZER = TinyOptimizer("adamw", {"lr": 1e-2})
SAMPLES = ragged_samples(16)
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
LLAMA = TinyModel("llama")
GPT2 = TinyModel("gpt2")

RECOMPUTATIONS = [
    pytest.param({"recompute_granularity": "full"}, id="full"),
    pytest.param(
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 2,
        },
        id="uniform-2",
    ),
    pytest.param(
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        id="block-1",
    ),
    pytest.param({"recompute_granularity": "selective"}, id="selective"),
    pytest.param({"recompute_activations": True}, id="recompute-activations"),
    *(
        pytest.param(
            {
                "recompute_granularity": "selective",
                "other_megatron_args": {"recompute_modules": modules},
            },
            id="-".join(modules),
        )
        for modules in (["layernorm"], ["mlp"], ["core_attn", "layernorm", "mlp"])
    ),
]
ONE = LayoutCase(1)
LAYOUTS = [
    pytest.param(LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True}), id="tp2-sp"),
    pytest.param(LayoutCase(2, {"tp_degree": 2}), id="tp2"),
    pytest.param(LayoutCase(2, {"pp_degree": 2}, 4), id="pp2"),
    pytest.param(LayoutCase(2, {"context_parallel_size": 2}), id="cp2"),
]


def run(layout: LayoutCase, model: TinyModel, **plugin: Any) -> list[RankResult]:
    return run_ranks(with_plugin, layout, model, {**DROPOUT, **plugin}, num_ranks=layout.num_ranks)


def with_plugin(layout: LayoutCase, model: TinyModel, plugin: dict[str, Any]) -> RankResult:
    return train(layout, model, OPTIMIZER, SAMPLES, **plugin)


@functools.cache
def plain_run(family: str, dropout: float = 0.1) -> list[RankResult]:
    """Train without recomputation on one rank."""
    model = {"gpt2": GPT2, "llama": LLAMA}[family]
    return run(ONE, model, attention_dropout=dropout, hidden_dropout=dropout)


def check_bit_equal(results: list[RankResult], plain: list[RankResult]) -> None:
    for result, other in zip(results, plain, strict=True):
        assert result.losses == other.losses
        assert result.grad_norms == other.grad_norms
        for name, value in result.shards.items():
            assert torch.equal(value, other.shards[name]), name


@pytest.mark.parametrize("recompute", RECOMPUTATIONS)
@pytest.mark.parametrize(
    "model",
    [pytest.param(GPT2, id="gpt2"), pytest.param(LLAMA, id="llama", marks=pytest.mark.slow)],
)
def test_with_dropout_every_number_is_bit_equal(
    model: TinyModel, recompute: dict[str, Any]
) -> None:
    results = run(ONE, model, **recompute)

    check_bit_equal(results, plain_run(model.family))
    # Dropout did take place, else equality would say little.
    assert results[0].losses != plain_run(model.family, dropout=0.0)[0].losses


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_with_dropout_every_number_is_bit_equal_over_ranks(
    layout: LayoutCase, granularity: str
) -> None:
    results = run(layout, LLAMA, recompute_granularity=granularity)

    check_bit_equal(results, run(layout, LLAMA))


class Kept:
    """A tensor that autograd keeps; gone when autograd drops it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(plugin: dict[str, Any]) -> int:
    """Bytes that autograd holds after the forward pass of one update, each storage once."""
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()
    at_loss: list[int] = []

    def pack(tensor: torch.Tensor) -> Kept:
        wrapper = Kept(tensor)
        kept.add(wrapper)
        return wrapper

    def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        storages = {
            storage.data_ptr(): storage.nbytes()
            for storage in (wrapper.tensor.untyped_storage() for wrapper in kept)
        }
        at_loss.append(sum(size for key, size in storages.items() if key not in parameters))
        return token_loss(loss_mask, output)

    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=MegatronLMPlugin(custom_loss_function=loss_func, **plugin),
    )
    hf_model = GPT2.build()
    model, _ = accelerator.prepare(hf_model, OPTIMIZER.build(hf_model))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda wrapper: wrapper.tensor):
        model(**global_batches(SAMPLES, 8)[0])
    return at_loss[0]


def bytes_with(**plugin: Any) -> int:
    result: int = run_ranks(saved_bytes, {**DROPOUT, **plugin}, num_ranks=1)[0]
    return result


def test_the_saved_activations_fall() -> None:
    nothing = bytes_with()
    selective = bytes_with(recompute_granularity="selective")
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    block_1, block_3 = (bytes_with(**block, recompute_num_layers=n) for n in (1, 3))
    uniform_1 = bytes_with(recompute_granularity="full")
    uniform_4 = bytes_with(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=4
    )

    assert uniform_4 < uniform_1 < block_3 < block_1 < nothing
    assert selective < nothing
    # The layers that are not recomputed keep the same each.
    assert (nothing - block_1) * 3 == pytest.approx(nothing - block_3, rel=0.01)


def prepare_error(plugin: dict[str, Any]) -> str:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    hf_model = GPT2.build()
    try:
        accelerator.prepare(hf_model, OPTIMIZER.build(hf_model))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plugin", "part"),
    [
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 3,
            },
            "must divide the 4 layers of a model into equal units; it can be 1 or 2 or 4.",
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 5,
            },
            "must be from 1 to the 4 layers",
        ),
    ],
    ids=["uneven-units", "too-many"],
)
def test_layers_that_cannot_be_recomputed_are_refused(plugin: dict[str, Any], part: str) -> None:
    assert part in run_ranks(prepare_error, plugin, num_ranks=1)[0]
