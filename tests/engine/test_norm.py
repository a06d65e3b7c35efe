"""The norm of the layer spec: torch's, marked for sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.ranks import run_ranks
from tests.training.start import TWO_LAYERS, TWO_LLAMA_LAYERS, start


def norms_of(recipe: Any, plugin: dict[str, Any]) -> dict[str, Any]:
    """Return kind, eps and marks of every norm of the model."""
    started = start(recipe, **plugin)
    return {
        name: (
            type(module).__name__,
            module.eps,
            [parameter.sequence_parallel for parameter in module.parameters()],
        )
        for name, module in started.model.named_modules()
        if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm))
    }


def test_gpt2_has_layer_norms_with_the_configs_eps() -> None:
    (norms,) = run_ranks(norms_of, TWO_LAYERS, {}, num_ranks=1)

    assert set(map(str, norms.values())) == {str(("LayerNorm", 1e-5, [False, False]))}
    assert len(norms) == 2 * 2 + 1


def test_llama_has_rms_norms_with_the_configs_eps() -> None:
    (norms,) = run_ranks(norms_of, TWO_LLAMA_LAYERS, {}, num_ranks=1)

    assert set(map(str, norms.values())) == {str(("RMSNorm", 1e-6, [False]))}


def test_norms_are_marked_under_sequence_parallelism() -> None:
    plugin = {"tp_degree": 2, "sequence_parallelism": True}

    norms, _ = run_ranks(norms_of, TWO_LLAMA_LAYERS, plugin, num_ranks=2)

    assert all(marks == [True] for _, _, marks in norms.values())
