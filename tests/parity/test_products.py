"""Training whose products oneDNN computes gives what plain PyTorch gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accelerate_megatron.engine import products
from accelerate_megatron.engine.cpu_products import has_onednn
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel
from tests.parity.test_parity import (
    ADAMW,
    SAMPLES,
    SCHEDULE,
    check_losses_and_norms,
    check_weights,
    expected,
    without_key_biases,
)
from tests.parity.training import LayoutCase, RankResult, train


def _train_by_onednn(*args: Any) -> tuple[RankResult, int]:
    """Train as on a CPU for which MKL is slow; return how many products oneDNN computed, too."""
    num_asked = 0
    real = products._product

    def counted(*factors: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return real(*factors)

    products._SMALLEST = 0
    products.has_slow_mkl = lambda: True  # type: ignore[assignment]
    products._product = counted
    return train(*args), num_asked


@pytest.mark.skipif(not has_onednn(), reason="needs a torch with oneDNN's linear layer")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_training_by_onednn_equals_plain_pytorch(family: str) -> None:
    model = TinyModel(family)
    layout = LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True})

    results = run_ranks(
        _train_by_onednn, layout, model, ADAMW, SAMPLES, SCHEDULE, num_ranks=layout.num_ranks
    )

    ranks = [result for result, _ in results]
    # Two micro-batches in each of five updates, each with at least 3 products in 2 layers.
    assert all(num_asked >= 5 * 2 * 2 * 3 * 3 for _, num_asked in results)
    oracle = expected(model, ADAMW)
    check_losses_and_norms(ranks, oracle)
    oracle = replace(oracle, weights=without_key_biases(oracle.weights))
    check_weights(without_key_biases(ranks[-1].weights), oracle)
