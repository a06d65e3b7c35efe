"""The patches, one by one: what each of them mends, on real ranks."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def megatron(name: str) -> Any:
    """Return a module of Megatron-Core; only ranks call it."""
    return importlib.import_module(f"megatron.core.{name}")


def on_one_rank(function, *args, **settings):
    return run_ranks(function, *args, num_ranks=1, **settings)[0]


def draws_of_the_tracker() -> dict[str, Any]:
    random = megatron("tensor_parallel.random")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    tracker = random.CudaRNGStatesTracker()
    tracker.add("inner", 1)
    tracker.add("outer", 2)
    torch.manual_seed(0)
    drawn = {"before": torch.rand(2)}
    with tracker.fork("outer"):
        drawn["outer 1"] = torch.rand(2)
        with tracker.fork("inner"):
            drawn["inner 1"] = torch.rand(2)
            with tracker.fork("outer"):
                drawn["outer 2"] = torch.rand(2)
        drawn["outer 3"] = torch.rand(2)
    with tracker.fork("inner"):
        drawn["inner 2"] = torch.rand(2)
    drawn["after"] = torch.rand(2)
    try:
        with tracker.fork("unknown"):
            pass
    except KeyError as error:
        drawn["error"] = str(error)
    return {**drawn, "logged": [record.getMessage() for record in records]}


def test_each_random_state_goes_on_where_it_was_left():
    drawn = on_one_rank(draws_of_the_tracker)

    for seed, names in ((0, ["before", "after"]), (2, ["outer 1", "outer 2", "outer 3"]),
                        (1, ["inner 1", "inner 2"])):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        for name in names:
            assert torch.equal(drawn[name], torch.rand(2, generator=generator)), name


def test_drawing_from_a_random_state_logs_nothing():
    assert on_one_rank(draws_of_the_tracker)["logged"] == []


def test_an_unknown_random_state_is_named_with_those_there_are():
    assert "'unknown', only ['inner', 'outer']" in on_one_rank(draws_of_the_tracker)["error"]


def gradients_with_and_without_recomputation() -> list[list[torch.Tensor]]:
    """Return gradients of a layer that, like Megatron's MLP, returns its bias unadded."""
    random = megatron("tensor_parallel.random")
    weight = torch.nn.Parameter(torch.randn(3, 3))
    bias = torch.nn.Parameter(torch.randn(3))
    x = torch.randn(2, 3)

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ weight, bias

    gradients = []
    for recompute in (False, True):
        inner = x.clone().requires_grad_()
        weight.grad = bias.grad = None
        out, skipped = random.checkpoint(layer, False, inner) if recompute else layer(inner)
        ((out + skipped) ** 2).sum().backward()
        gradients.append([inner.grad, weight.grad.clone(), bias.grad.clone()])
    return gradients


def test_a_recomputed_function_may_return_a_parameter():
    plain, recomputed = on_one_rank(gradients_with_and_without_recomputation)

    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def gradients_without_kept_outputs() -> list[list[torch.Tensor]]:
    random = megatron("tensor_parallel.random")
    norm, linear = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    gradients = []
    for discard in (False, True):
        norm.zero_grad()
        linear.zero_grad()
        if discard:
            checkpoint = random.CheckpointWithoutOutput(fp8=False)
            normed = checkpoint.checkpoint(norm, x)
            out = linear(normed)
            checkpoint.discard_output_and_register_recompute(out)
            assert normed.untyped_storage().size() == 0
        else:
            out = linear(norm(x))
        (out**2).sum().backward()
        parameters = [*norm.parameters(), *linear.parameters()]
        gradients.append([parameter.grad.clone() for parameter in parameters])
    return gradients


def test_a_discarded_output_is_recomputed_without_fp8_and_without_a_compiler():
    plain, recomputed = on_one_rank(gradients_without_kept_outputs, env={"CXX": "/no/compiler"})

    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


# --- versions -------------------------------------------------------------------------------


def test_no_version_of_transformer_engine_is_reached_without_it():
    assert on_one_rank(_is_te_min_version) == [False, False]


def _is_te_min_version() -> list[bool]:
    utils = megatron("utils")
    return [utils.is_te_min_version("0.1"), utils.is_te_min_version("0.1", check_equality=False)]


# --- optimizer classes ----------------------------------------------------------------------


def test_the_distributed_optimizer_takes_our_adam_and_sgd_and_knows_apexs_contract():
    assert on_one_rank(_optimizer_classes) == {
        "adam": "FusedAdam",
        "sgd": "SGD",
        "torch's adam": False,
        "distributed": (["FusedAdam", "SGD"], True, True),
    }


def _optimizer_classes() -> dict[str, object]:
    optimizer, distributed = megatron("optimizer"), megatron("optimizer.distrib_optimizer")
    classes = [kind.__name__ for kind in distributed.Adam]
    return {
        "adam": optimizer.Adam.__name__,
        "sgd": optimizer.SGD.__name__,
        "torch's adam": optimizer.USING_PYTORCH_OPTIMIZER,
        "distributed": (classes, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER),
    }


# --- mixture of experts ---------------------------------------------------------------------


def routed() -> tuple[torch.Tensor, torch.Tensor]:
    utils = megatron("transformer.moe.moe_utils")
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    return utils.router_gating_linear(x, weight, None, torch.float32), x @ weight.t()


def test_the_router_of_an_moe_layer_works_without_transformer_engine():
    logits, expected = on_one_rank(routed)

    torch.testing.assert_close(logits, expected)


# --- collectives ----------------------------------------------------------------------------

SIZES = [3, 0, 2]


def gathered_and_scattered() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mappings = megatron("tensor_parallel.mappings")
    rank, group = dist.get_rank(), dist.group.WORLD
    mine = torch.full((SIZES[rank], 2), float(rank + 1))
    whole = mappings._gather_along_first_dim(mine, group, SIZES)
    summed = mappings._reduce_scatter_along_first_dim(whole * (rank + 1), group, SIZES)
    even = mappings._gather_along_first_dim(torch.full((1, 2), float(rank)), group)
    return whole, summed, even


def test_gloo_gathers_and_scatters_pieces_of_different_lengths():
    results = run_ranks(gathered_and_scattered, num_ranks=3)

    expected = torch.tensor([1.0, 1, 1, 3, 3])[:, None].expand(5, 2)
    for (whole, summed, even), piece in zip(results, expected.split(SIZES), strict=True):
        assert torch.equal(whole, expected)
        assert torch.equal(summed, 6 * piece)
        assert torch.equal(even, torch.tensor([0.0, 1, 2])[:, None].expand(3, 2))


# --- fully sharded data parallelism ---------------------------------------------------------


def test_pytorchs_fsdp_wrapper_takes_what_finalize_model_grads_passes():
    assert "force_all_reduce" in on_one_rank(_parameters_of_finish_grad_sync)


def _parameters_of_finish_grad_sync() -> list[str]:
    wrapper = megatron("distributed").TorchFullyShardedDataParallel
    return list(inspect.signature(wrapper.finish_grad_sync).parameters)


# --- optimizer state on the host ------------------------------------------------------------


def trained_with_and_without_offloading() -> list[torch.Tensor]:
    hybrid = megatron("optimizer.cpu_offloading.hybrid_optimizer")
    adam = megatron("optimizer").Adam
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4))
    other = copy.deepcopy(parameter)
    optimizers = [
        torch.optim.AdamW([{"params": [parameter]}], lr=0.1, weight_decay=0.0),
        hybrid.HybridDeviceOptimizer(
            [{"params": [other], "lr": 0.1, "weight_decay": 0.0}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=adam,
            lr=0.1,
            weight_decay=0.0,
        ),
    ]
    for _ in range(3):
        for tensor, optimizer in zip((parameter, other), optimizers, strict=True):
            tensor.grad = tensor.detach().sin()
            optimizer.step()
    return [parameter.detach(), other.detach()]


def test_offloading_on_the_cpu_trains_the_parameters():
    plain, offloaded = on_one_rank(trained_with_and_without_offloading)

    torch.testing.assert_close(offloaded, plain, rtol=1e-6, atol=1e-7)
