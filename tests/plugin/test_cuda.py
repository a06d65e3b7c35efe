"""What fields do that act on CUDA alone; on the CPU they are refused with the reason."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import TWO_LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def updates(plugin: dict[str, Any]) -> Any:
    """Return the losses of three updates on CUDA, and the dtypes of the optimizer's moments."""
    from accelerate_megatron import Accelerator, MegatronLMPlugin

    accelerator = Accelerator(mixed_precision="bf16", megatron_lm_plugin=MegatronLMPlugin(**plugin))
    model = TWO_LAYERS.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = {name: value.cuda() for name, value in pad_samples(ragged_samples(8)).items()}
    losses = [model(**batch).loss.item() for _ in range(3)]
    [part] = optimizer.session.optimizer.chained_optimizers
    states = part.optimizer.state.values()
    return losses, {state["exp_avg"].dtype for state in states if "exp_avg" in state}


def leaves_the_hosts_random_numbers() -> bool:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    updates({})
    return torch.equal(before, torch.get_rng_state())


def test_building_a_model_on_a_device_leaves_the_hosts_random_numbers() -> None:
    assert run_ranks(leaves_the_hosts_random_numbers, num_ranks=1, process_group=False) == [True]


def test_overlapped_copies_of_an_offloaded_optimizer_change_no_loss() -> None:
    offload = {"optimizer_cpu_offload": True, "use_distributed_optimizer": True}

    [(plain, _)] = run_ranks(updates, offload, num_ranks=1, process_group=False)
    [(overlapped, _)] = run_ranks(
        updates,
        {**offload, "overlap_cpu_optimizer_d2h_h2d": True},
        num_ranks=1,
        process_group=False,
    )

    assert overlapped == pytest.approx(plain, abs=1e-5)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
def test_moments_have_the_dtype_that_is_asked_for() -> None:
    plugin = {
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
        "other_megatron_args": {"exp_avg_dtype": "bf16"},
    }

    [(_, dtypes)] = run_ranks(updates, plugin, num_ranks=1, process_group=False)

    assert dtypes == {torch.bfloat16}
