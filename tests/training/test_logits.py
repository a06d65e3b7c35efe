"""`return_logits`: those of transformers, on the last stage, with the same loss as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.training.gather import gather_across_data_parallel_groups
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_encoders import encoder_samples, pad_encoder_samples
from tests.helpers.tiny_models import VOCAB_SIZE, TinyModel, pad_samples, ragged_samples
from tests.training.start import TWO_LAYERS, TWO_LLAMA_LAYERS, start

SAMPLES = ragged_samples(6)
BATCH = pad_samples(SAMPLES)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"tp_degree": 2, "sequence_parallelism": True}),
    "tp2-pp2": (4, {"tp_degree": 2, "pp_degree": 2}),
    "cp2": (2, {"context_parallel_size": 2, "num_micro_batches": 2}),
}


def two_steps(plugin: dict[str, Any]) -> Any:
    """Return logits and losses of an evaluation and an update."""
    model = start(TWO_LLAMA_LAYERS, **plugin).model
    model.eval()
    with torch.no_grad():
        evaluated = model(**BATCH)
    model.train()
    updated = model(**BATCH)
    losses = [evaluated.loss.item(), updated.loss.item()]
    return model.session.ranks.is_last_stage, losses, [evaluated.logits, updated.logits]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers_on_every_rank_of_the_last_stage(layout: str) -> None:
    num_ranks, plugin = LAYOUTS[layout]
    with torch.no_grad():
        want = TWO_LLAMA_LAYERS.build().eval()(**BATCH).logits
    is_real = BATCH["attention_mask"].bool()

    without = run_ranks(two_steps, plugin, num_ranks=num_ranks)
    results = run_ranks(two_steps, {**plugin, "return_logits": True}, num_ranks=num_ranks)

    assert [losses for _, losses, _ in results] == [losses for _, losses, _ in without]
    assert all(logits is None for *_, both in without for logits in both)
    for is_last, _, both in results:
        for logits in both:
            if not is_last:
                assert logits is None
                continue
            assert logits.shape == (6, BATCH["input_ids"].shape[1], VOCAB_SIZE)
            assert not logits.requires_grad
            torch.testing.assert_close(logits[is_real], want[is_real], atol=2e-5, rtol=1e-5)


def gathered() -> Any:
    """Evaluate 6 samples on two replicas, whose last batches are half full."""
    samples = [{name: value[:9] for name, value in sample.items()} for sample in SAMPLES]
    started = start(TWO_LAYERS, samples=samples, tp_degree=2, batch_size=2, return_logits=True)
    accelerator, model = started.accelerator, started.model
    model.eval()
    metrics, raw = [], []
    with torch.no_grad():
        for batch in started.loader:
            logits = model(**batch).logits
            raw.append(gather_across_data_parallel_groups(logits))
            metrics.append(accelerator.gather_for_metrics(logits))
        want = started.hf_model.eval()(**pad_samples(samples)).logits
    return torch.cat(raw), torch.cat(metrics), want


def test_gathered_logits_are_one_for_each_sample_in_order() -> None:
    for raw, metrics, want in run_ranks(gathered, num_ranks=4):
        assert len(raw) == 8
        assert metrics.shape == want.shape
        torch.testing.assert_close(metrics, want, atol=2e-5, rtol=1e-5)


def of_other_lengths() -> str:
    started = start(TWO_LAYERS, samples=SAMPLES, return_logits=True)
    model = started.model
    length = 5 + model.session.ranks.dp_rank
    batch = {name: value[:, :length] for name, value in BATCH.items()}
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
    try:
        started.accelerator.gather(logits)
    except ValueError as error:
        return str(error)
    return ""


def test_gathering_logits_of_other_lengths_is_refused_on_every_rank() -> None:
    texts = run_ranks(of_other_lengths, num_ranks=2)

    assert texts[0] == texts[1]
    assert "[5, 99]" in texts[0]
    assert "[6, 99]" in texts[0]


def logits_of(model: TinyModel, labels: str) -> tuple[bool, dict[str, torch.Tensor]]:
    """Return whether this is the last stage, and the logits of three rows in two micro-batches."""
    plugin = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2, "return_logits": True}
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    ours = accelerator.prepare(model.build()).eval()
    outputs = ours(**pad_encoder_samples(encoder_samples(3, labels)))
    found = {name: value for name, value in outputs.items() if name != "loss"}
    return ours.session.ranks.is_last_stage, found


@pytest.mark.parametrize(
    ("family", "labels", "names"),
    [
        pytest.param("bert", "tokens", ["logits"], id="masked", marks=pytest.mark.slow),
        pytest.param(
            "megatron-bert-pretraining",
            "sentences",
            ["prediction_logits", "seq_relationship_logits"],
            id="sentences",
        ),
        pytest.param("bert-classifier", "class", ["logits"], id="classes"),
    ],
)
def test_each_heads_logits_are_those_of_transformers(
    family: str, labels: str, names: list[str]
) -> None:
    model = TinyModel(family, changes={"num_hidden_layers": 2, "num_labels": 3})
    batch = pad_encoder_samples(encoder_samples(3, labels))
    ranks = run_ranks(logits_of, model, labels, num_ranks=4)

    with torch.no_grad():
        wanted = model.build().eval()(**batch)
    is_real = batch["attention_mask"].bool()
    assert [is_last for is_last, _ in ranks] == [False, False, True, True]
    for is_last, found in ranks:
        assert list(found) == (names if is_last else [])
        for name, value in found.items():
            theirs = wanted[name]
            assert value.shape == theirs.shape
            if value.dim() == 3:  # padding may differ, as nothing reads it
                value, theirs = value[is_real], theirs[is_real]
            torch.testing.assert_close(value, theirs, rtol=0, atol=2e-5)
