"""Rotary positions forced on a GPT-2 or BERT: trained as having them, saved as nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import CheckpointMismatchError, UnsupportedError
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_encoders import encoder_samples, pad_encoder_samples
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches, pad_samples
from tests.helpers.tiny_models import ragged_samples as samples
from tests.parity.test_parity import check_losses_and_norms, check_weights
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase, train
from tests.training.start import start

SGD = TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9})
SAMPLES = samples(3 * GLOBAL_BATCH_ROWS + 3)
BATCH = pad_samples(SAMPLES[:4])
TWO_LAYERS = TinyModel("gpt2", changes={"n_layer": 2})
FORCED = {"use_rotary_position_embeddings": True}
OWN_BASE = {"other_megatron_args": {"position_embedding_type": "rope", "rotary_base": 500}}


@pytest.mark.parametrize(
    ("layout", "asked", "base"),
    [
        pytest.param(LayoutCase(2, {"tp_degree": 2}), FORCED, 10000.0, id="tp2"),
        pytest.param(
            LayoutCase(2, {"pp_degree": 2}, 4),
            OWN_BASE,
            500.0,
            id="pp2-by-argument",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_equals_a_gpt2_whose_queries_and_keys_are_turned(
    layout: LayoutCase, asked: dict[str, Any], base: float
) -> None:
    ranks = run_ranks(
        train, replace(layout, plugin=layout.plugin | asked), TWO_LAYERS, SGD, SAMPLES, num_ranks=2
    )

    batches = global_batches(SAMPLES, GLOBAL_BATCH_ROWS)
    oracle = oracle_run(OracleCase(replace(TWO_LAYERS, rotary_base=base), SGD, batches))
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)
    left_out = set(TWO_LAYERS.build().state_dict()) - set(ranks[-1].weights or ())
    assert left_out == {"transformer.wpe.weight", "lm_head.weight"}, "the latter is tied"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            LayoutCase(4, {"tp_degree": 2, "pp_degree": 2, "sequence_parallelism": True}),
            id="tp2-pp2-sp",
        ),
        pytest.param(LayoutCase(2, {"recompute_granularity": "full"}), id="dp2-recomputed"),
    ],
)
@pytest.mark.slow
def test_training_equals_a_bert_whose_queries_and_keys_are_turned(layout: LayoutCase) -> None:
    bert, rows = TinyModel("bert"), GLOBAL_BATCH_ROWS
    masked = encoder_samples(3 * rows)
    layout = replace(layout, plugin=layout.plugin | FORCED)

    ranks = run_ranks(
        partial(train, collate=pad_encoder_samples),
        layout,
        bert,
        SGD,
        masked,
        num_ranks=layout.num_ranks,
    )

    batches = [pad_encoder_samples(masked[n : n + rows]) for n in range(0, len(masked), rows)]
    oracle = oracle_run(OracleCase(replace(bert, rotary_base=10000.0), SGD, batches))
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)
    assert "bert.embeddings.position_embeddings.weight" not in (ranks[-1].weights or ())


def forced_run(folder: str) -> Any:
    """Go through a folder of weights, generation, saving and loading with forced positions."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate_megatron").addHandler(handler)
    hf_model = TWO_LAYERS.build()
    hf_model.save_pretrained(f"{folder}/hf")
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**FORCED))
    model = accelerator.prepare(hf_model, weights=f"{folder}/hf")
    model.eval()
    loss = model(**BATCH).loss.item()
    tokens = model.megatron_generate(BATCH["input_ids"][:1, :5], max_new_tokens=8)
    accelerator.save_state(f"{folder}/state")
    refused = error_of(lambda: model.save_pretrained(f"{folder}/saved"))
    accelerator.free_memory()
    again = accelerator.prepare(replace(TWO_LAYERS, seed=5).build())
    accelerator.load_state(f"{folder}/state")
    again.eval()
    loaded = again(**BATCH).loss.item()
    accelerator.free_memory()
    accelerator.state.megatron_lm_plugin.use_rotary_position_embeddings = None
    accelerator.prepare(TWO_LAYERS.build())
    mismatch = error_of(lambda: accelerator.load_state(f"{folder}/state"))
    return loss, loaded, tokens, refused, mismatch, said


def error_of(action: Any) -> Exception | None:
    try:
        action()
    except (CheckpointMismatchError, UnsupportedError) as error:
        return error
    return None


def test_its_weights_come_without_positions_and_are_kept_as_what_they_are(tmp_path: Path) -> None:
    [(loss, loaded, tokens, refused, mismatch, said)] = run_ranks(
        forced_run, str(tmp_path), num_ranks=1
    )

    turned = replace(TWO_LAYERS, rotary_base=10000.0).build().eval()
    with torch.no_grad():
        assert loss == pytest.approx(float(turned(**BATCH).loss), abs=1e-5)
        next_token = turned(BATCH["input_ids"][:1, :5]).logits[0, -1].argmax()
    assert tokens[0, 5] == next_token
    assert loaded == loss
    [line] = [line for line in said if "forces rotary positions" in line]
    assert "(transformer.wpe.weight) are left out" in line
    assert isinstance(refused, UnsupportedError)
    assert "no gpt2 any more" in str(refused)
    assert not (tmp_path / "saved").exists()
    assert isinstance(mismatch, CheckpointMismatchError)
    assert "position_embedding is 'learned_absolute' here and 'rope'" in str(mismatch)


def evaluated(family: str, plugin: dict[str, Any]) -> None:
    start(TinyModel(family), **plugin)


@pytest.mark.parametrize(
    ("family", "asked", "why"),
    [
        ("t5", True, "t5 model has relative positions, and this version forces rotary ones on mod"),
        ("llama", False, "its weights hold no others"),
    ],
)
def test_positions_that_a_model_cannot_get_are_refused_with_the_reason(
    family: str, asked: bool, why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        run_ranks(evaluated, family, {"use_rotary_position_embeddings": asked}, num_ranks=1)
