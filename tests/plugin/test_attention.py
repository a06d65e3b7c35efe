"""What `attention_backend` and `attention_softmax_in_fp32` do in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from accelerate_megatron import MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import TWO_LAYERS, TWO_LLAMA_LAYERS, start

SAMPLES = ragged_samples(8)
BATCH = pad_samples(SAMPLES)


def losses(recipe: TinyModel, plugin: dict[str, Any], precision: str = "no") -> Any:
    """Return the losses of three updates, and the bytes that the first one kept for backward."""
    started = start(recipe, samples=SAMPLES, mixed_precision=precision, **plugin)
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # keeps the storage, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        values = [started.model(**BATCH).loss.item()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    values += [started.model(**BATCH).loss.item() for _ in range(2)]
    return values, sum(storages.values())


@pytest.mark.parametrize(
    ("recipe", "plugin"),
    [
        (TWO_LAYERS, {}),
        (TWO_LLAMA_LAYERS, {}),
        pytest.param(TWO_LLAMA_LAYERS, {"tp_degree": 2}, marks=pytest.mark.slow),
        (TWO_LAYERS, {"context_parallel_size": 2}),
    ],
    ids=["gpt2", "llama", "llama-tp2", "gpt2-cp2"],
)
def test_unfused_attention_keeps_the_scores_and_gives_the_same_losses(
    recipe: TinyModel, plugin: dict[str, Any]
) -> None:
    num_ranks = plugin.get("tp_degree", plugin.get("context_parallel_size", 1))
    _, (fused, kept) = _both(recipe, {**plugin, "attention_backend": True}, num_ranks)
    _, (unfused, kept_more) = _both(recipe, {**plugin, "attention_backend": "unfused"}, num_ranks)

    assert unfused == pytest.approx(fused, abs=1e-5)
    assert kept_more > kept


def test_unfused_attention_adds_the_positions_of_a_t5() -> None:
    fused, unfused = (
        run_ranks(losses, TinyModel("t5"), {"attention_backend": backend}, num_ranks=1)[0][0]
        for backend in ("sdpa", "unfused")
    )

    assert unfused == pytest.approx(fused, abs=1e-5)


def _both(recipe: TinyModel, plugin: dict[str, Any], num_ranks: int) -> tuple[int, Any]:
    results = run_ranks(losses, recipe, plugin, num_ranks=num_ranks)
    assert all(result[0] == results[0][0] for result in results)
    return num_ranks, results[0]


def test_false_is_the_unfused_one_and_none_is_true() -> None:
    def run(value: Any) -> Any:
        return run_ranks(losses, TWO_LAYERS, {"attention_backend": value}, num_ranks=1)[0]

    assert run(False) == run("unfused") == run("local")
    assert run(None) == run(True) == run("sdpa")


def test_a_softmax_in_bf16_rounds_and_one_in_fp32_does_not() -> None:
    def run(in_fp32: bool, **changes: Any) -> Any:
        plugin = {"attention_backend": "unfused", "attention_softmax_in_fp32": in_fp32}
        return run_ranks(losses, TWO_LAYERS, plugin | changes, "bf16", num_ranks=1)[0][0]

    assert run(True) != run(False)
    assert run(False) == pytest.approx(run(True), abs=0.05)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("masked", ["", "hidden", "added"])
def test_unfused_attention_and_its_gradients_are_torchs(groups: int, masked: str) -> None:
    from accelerate_megatron.engine.unfused_attention import unfused_attention

    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, groups, 7, 8, dtype=torch.float64, requires_grad=True) for _ in "kv"
    )
    mask = None
    if masked == "hidden":
        mask = torch.rand(2, 1, 5, 7) < 0.4
        mask[0, 0, 2] = True  # a query that may look nowhere
    elif masked == "added":
        mask = torch.randn(1, 4, 5, 7, dtype=torch.float64)
    ours = unfused_attention(
        *(query, key, value, mask), scale=0.3, dropout=0.0, softmax_in_fp32=False
    )
    theirs = F.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=~mask if mask is not None and masked == "hidden" else mask,
        scale=0.3,
        enable_gqa=groups != 4,
    )

    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad((ours * weights).sum(), (query, key, value)),
        torch.autograd.grad((theirs * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("flash", "a kernel of Transformer Engine's.*'sdpa' is torch's, 'unfused' the plain one"),
        ("fused", "a kernel of Transformer Engine's"),
        ("sdap", "it must be True or 'auto' .the fastest., 'sdpa'"),
    ],
)
def test_a_backend_that_is_not_here_is_refused(backend: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin(attention_backend=backend)


@pytest.mark.parametrize(
    ("plugin", "precision", "message"),
    [
        ({}, "bf16", "keeps no scores always has its softmax in fp32"),
        ({"attention_backend": "unfused"}, "no", "mixed_precision is 'no', so that all is fp32"),
    ],
)
def test_a_softmax_outside_fp32_that_would_have_no_effect_is_refused(
    plugin: dict[str, Any], precision: str, message: str
) -> None:
    plugin = {**plugin, "attention_softmax_in_fp32": False}

    with pytest.raises(ConfigurationError, match=message):
        run_ranks(losses, TWO_LAYERS, plugin, precision, num_ranks=1)
