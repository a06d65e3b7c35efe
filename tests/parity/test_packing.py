"""Packed and unpacked training of the same samples is the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.data.packing import PackedDataset
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import (
    TinyModel,
    TinyOptimizer,
    pad_samples,
    ragged_samples,
)

ROW = 32
LR = 0.1


def samples_of(number: int = 12) -> list[dict[str, torch.Tensor]]:
    """Return short samples, so that rows hold several, whose first labels are a prompt's."""
    return [{key: value[:14] for key, value in s.items()} for s in ragged_samples(number)]


def update(model: TinyModel, is_packed: bool, plugin: dict[str, Any]) -> Any:
    """Do one update with plain SGD on all samples; return its loss and the new weights."""
    accelerator = Accelerator(
        cpu=True, megatron_lm_plugin=MegatronLMPlugin(gradient_clipping=0.0, **plugin)
    )
    hf_model = model.build()
    optimizer = TinyOptimizer("sgd", {"lr": LR}).build(hf_model)
    samples = samples_of()
    dp_size = accelerator.num_processes // plugin.get("tp_degree", 1)
    dp_size //= plugin.get("pp_degree", 1) * plugin.get("context_parallel_size", 1)
    share = plugin.get("num_micro_batches", 1) * dp_size
    if is_packed:
        packed = PackedDataset(samples, ROW)
        assert len(packed) <= len(samples) / 2
        loader = DataLoader(packed, batch_size=-(-len(packed) // share))
    else:
        loader = DataLoader(samples, batch_size=12 // share, collate_fn=pad_samples)
    prepared, _, loader = accelerator.prepare(hf_model, optimizer, loader)
    (loss,) = [prepared(**batch).loss.item() for batch in loader]
    return loss, accelerator.get_state_dict(prepared)


def assert_equal_updates(packed: Any, plain: Any) -> None:
    assert packed[0] == pytest.approx(plain[0], abs=1e-5)
    for name, value in plain[1].items():
        # The difference of weights is LR times that of the gradients.
        torch.testing.assert_close(packed[1][name], value, rtol=0, atol=LR * 1e-5)


@pytest.mark.parametrize(
    ("family", "plugin", "num_ranks"),
    [
        pytest.param("gpt2", {}, 1, id="gpt2"),
        pytest.param("llama", {}, 1, id="llama"),
        pytest.param("phi3", {}, 1, id="phi3", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, 1, id="deepseek_v3", marks=pytest.mark.slow),
        pytest.param(
            "llama",
            {"tp_degree": 2, "sequence_parallelism": True},
            2,
            id="llama-tp2-sp",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {"pp_degree": 2, "num_micro_batches": 2},
            2,
            id="llama-pp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama", {"context_parallel_size": 2}, 2, id="llama-cp2", marks=pytest.mark.slow
        ),
    ],
)
def test_packed_and_unpacked_training_are_equal(
    family: str, plugin: dict[str, Any], num_ranks: int
) -> None:
    model = TinyModel(family)

    (plain,) = run_ranks(update, model, False, {}, num_ranks=1)
    packed = run_ranks(update, model, True, plugin, num_ranks=num_ranks)

    assert_equal_updates(packed[-1], plain)


def losses_of_samples(model: TinyModel, changed: int) -> list[float]:
    """Return the loss of each sample of one packed row, with a token of one sample changed."""
    samples = [{"input_ids": s["input_ids"].clone()} for s in samples_of(3)]
    samples[changed]["input_ids"][1] = 7
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    hf_model = model.build()
    prepared, _ = accelerator.prepare(hf_model, TinyOptimizer().build(hf_model))
    prepared.eval()
    (row,) = PackedDataset(samples, 48)
    losses = []
    for number in range(3):
        labels = row["labels"].masked_fill(row["seq_idx"] != number, -100)
        batch = {key: value[None] for key, value in (row | {"labels": labels}).items()}
        losses.append(prepared(**batch).loss.item())
    return losses


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_changed_token_changes_the_loss_of_no_other_sample(family: str) -> None:
    model = TinyModel(family)

    ((first, second),) = run_ranks(both_changes, model, num_ranks=1)

    assert first[1] == pytest.approx(second[1], abs=0)
    assert first[0] != second[0]
    assert first[2] != second[2]


def both_changes(model: TinyModel) -> tuple[list[float], list[float]]:
    from accelerate.state import AcceleratorState, GradientState

    first = losses_of_samples(model, 0)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return first, losses_of_samples(model, 2)


def hf_losses(model: TinyModel) -> tuple[float, float]:
    """Return our loss and transformers' of a row that only its positions mark as packed."""
    row = PackedDataset(samples_of(3), 48)[0]
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    hf_model = model.build()
    prepared, _ = accelerator.prepare(hf_model, TinyOptimizer().build(hf_model))
    prepared.eval()
    batch = {key: row[key][None] for key in ("input_ids", "labels", "position_ids")}
    with torch.no_grad():
        theirs = model.build().eval()(**batch, use_cache=False).loss.item()
    return prepared(**batch).loss.item(), theirs


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_that_begin_anew_mean_packing_as_in_transformers(family: str) -> None:
    ((ours, theirs),) = run_ranks(hf_losses, TinyModel(family), num_ranks=1)

    assert ours == pytest.approx(theirs, abs=1e-5)
