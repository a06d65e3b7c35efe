"""BERT and T5 in bf16 and fp16 train as transformers' models in fp32 do, up to rounding.

The oracle's numbers are those of fp32, so the tolerances are for every rounding of a half-precision
run: of the weights themselves, 2^-9 of each in bf16 and 2^-12 in fp16, and of what the layers pass
on. The loss is a mean over some hundred tokens with independent errors; the gradient norm has gone
through the layers both ways.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_encoders import encoder_samples, pad_encoder_samples
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, translation_samples
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase, train

UPDATES = 3
SGD = TinyOptimizer("sgd", {"lr": 0.02, "momentum": 0.9})
BERT = TinyModel("bert-pretraining", changes={"num_hidden_layers": 2})
T5 = TinyModel("t5", changes={"num_layers": 2, "num_decoder_layers": 2})
TP2_SP = LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True})
BERT_PP2 = LayoutCase(2, {"pp_degree": 2})
T5_PP2 = LayoutCase(2, {"pp_degree": 2, "pipeline_model_parallel_split_rank": 1})
# Relative. A loss of fp16 is off by an eighth of one of bf16.
LOSS = {"bf16": 4e-3, "fp16": 5e-4}
GRAD_NORM = {"bf16": 2e-2, "fp16": 2.5e-3}
SCALED: dict[str, Any] = {"other_megatron_args": {"initial_loss_scale": 2.0**6}}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(BERT, TP2_SP, id="bert-tp2-sp"),
        pytest.param(BERT, BERT_PP2, id="bert-pp2", marks=pytest.mark.slow),
        pytest.param(T5, T5_PP2, id="t5-pp2"),
        pytest.param(T5, TP2_SP, id="t5-tp2-sp", marks=pytest.mark.slow),
    ],
)
def test_half_precision_trains_as_fp32_up_to_rounding(
    model: TinyModel, layout: LayoutCase, precision: str
) -> None:
    rows = UPDATES * GLOBAL_BATCH_ROWS
    collate: Any = pad_encoder_samples if model is BERT else pad_samples
    samples = encoder_samples(rows, "sentences") if model is BERT else translation_samples(rows)
    scaled = SCALED if precision == "fp16" else {}

    ranks = run_ranks(
        partial(train, mixed_precision=precision, collate=collate, **scaled),
        layout,
        model,
        SGD,
        samples,
        num_ranks=layout.num_ranks,
    )

    batches = [
        collate(samples[start : start + GLOBAL_BATCH_ROWS])
        for start in range(0, rows, GLOBAL_BATCH_ROWS)
    ]
    oracle = oracle_run(OracleCase(model=model, optimizer=SGD, batches=batches, clip=1.0))
    losses, norms = torch.tensor(ranks[0].losses), torch.tensor(ranks[0].grad_norms)
    wanted, wanted_norms = torch.tensor(oracle.losses), torch.tensor(oracle.grad_norms)
    assert len({tuple(rank.losses) for rank in ranks}) == 1
    assert not torch.equal(losses, wanted), "nothing was rounded"
    torch.testing.assert_close(losses, wanted, rtol=LOSS[precision], atol=0)
    torch.testing.assert_close(norms, wanted_norms, rtol=GRAD_NORM[precision], atol=0)
