"""What a config can say about a model, and how a batch is cut, each equal to plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import LinearSchedule, OracleCase, OracleRun
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, global_batches, ragged_samples
from tests.parity.test_parity import check_losses_and_norms, check_weights
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase, Schedule, train

SLOW = pytest.mark.slow
SGD = TinyOptimizer("sgd", {"lr": 0.1, "momentum": 0.9})
SAMPLES = ragged_samples(2 * GLOBAL_BATCH_ROWS + 3)
TP2 = LayoutCase(2, {"tp_degree": 2})
PP2 = LayoutCase(2, {"pp_degree": 2}, 4)
SP2 = LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True})
DP2 = LayoutCase(2)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}

VARIANTS = [
    pytest.param(TinyModel("llama"), TP2, id="grouped-queries-tp2", marks=SLOW),
    pytest.param(TinyModel("llama"), SP2, id="grouped-queries-sp"),
    pytest.param(
        TinyModel("llama", changes={"num_key_value_heads": 1}), PP2, id="one-key-head-pp2"
    ),
    pytest.param(TinyModel("llama", changes={"head_dim": 32}), TP2, id="wide-heads", marks=SLOW),
    pytest.param(TinyModel("llama", changes={"head_dim": 8}), PP2, id="narrow-heads"),
    pytest.param(TinyModel("llama", changes={"rope_parameters": LLAMA3}), TP2, id="rope-llama3"),
    pytest.param(TinyModel("llama", changes={"rope_parameters": LINEAR}), PP2, id="rope-linear"),
    pytest.param(
        TinyModel("llama", changes={"attention_bias": True, "mlp_bias": True}), TP2, id="biases"
    ),
    pytest.param(TinyModel("llama", changes={"rms_norm_eps": 1e-2}), SP2, id="rms-eps", marks=SLOW),
    pytest.param(TinyModel("llama", changes={"hidden_act": "gelu"}), TP2, id="geglu", marks=SLOW),
    pytest.param(TinyModel("gpt2", changes={"n_inner": 96}), TP2, id="n-inner"),
    pytest.param(TinyModel("gpt2", changes={"activation_function": "gelu"}), TP2, id="gelu"),
    pytest.param(
        TinyModel("gpt2", changes={"activation_function": "relu"}), PP2, id="relu", marks=SLOW
    ),
    pytest.param(
        TinyModel("gpt2", changes={"layer_norm_epsilon": 1e-2}), SP2, id="layer-eps", marks=SLOW
    ),
    pytest.param(
        TinyModel("gpt2", changes={"scale_attn_by_inverse_layer_idx": True}),
        PP2,
        id="by-layer-pp2",
        marks=SLOW,
    ),
    pytest.param(
        TinyModel("gpt2", changes={"scale_attn_by_inverse_layer_idx": True}),
        LayoutCase(2, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}, 4),
        id="by-layer-virtual",
    ),
    pytest.param(
        TinyModel("gpt2", changes={"scale_attn_weights": False, "initializer_range": 0.05}),
        TP2,
        id="unscaled",
    ),
    pytest.param(TinyModel("gpt2", changes={"vocab_size": 101}), TP2, id="vocabulary-101"),
    # 300 rows, padded to 512: rank 0 holds 256 real ones and rank 1 the other 44.
    pytest.param(TinyModel("gpt2", changes={"vocab_size": 300}), TP2, id="vocabulary-300"),
    pytest.param(
        TinyModel("llama", tied=False, changes={"vocab_size": 300, "num_key_value_heads": 4}),
        LayoutCase(4, {"tp_degree": 4}),
        id="vocabulary-300-tp4-untied",
    ),
    pytest.param(
        TinyModel("gpt2", changes={"vocab_size": 256}), TP2, id="vocabulary-unpadded", marks=SLOW
    ),
    pytest.param(TinyModel("gpt2"), LayoutCase(1, {}, 1), id="micro-batches-1", marks=SLOW),
    pytest.param(TinyModel("gpt2"), LayoutCase(1, {}, 8), id="micro-batches-8"),
    pytest.param(TinyModel("gpt2"), LayoutCase(2, {}, 4), id="dp2-micro-batches-4"),
    pytest.param(TinyModel("gpt2"), LayoutCase(2, {"pp_degree": 2}, 1), id="pp2-micro-batches-1"),
    pytest.param(
        TinyModel("llama"), LayoutCase(2, {"pp_degree": 2}, 8), id="pp2-micro-batches-8", marks=SLOW
    ),
    pytest.param(TinyModel("gpt2"), LayoutCase(1, {"seq_length": 32}), id="fixed-length"),
]


def samples_for(model: TinyModel) -> list[dict[str, object]]:
    """Return samples whose tokens are all over the vocabulary."""
    vocab_size = model.config().vocab_size
    return [
        {
            **sample,
            "input_ids": sample["input_ids"] * 7 % vocab_size,
            "labels": (sample["labels"] * 7 % vocab_size).where(sample["labels"] >= 0, -100),
        }
        for sample in SAMPLES
    ]


def expected(model: TinyModel, **changes: object) -> OracleRun:
    case = OracleCase(
        model=model,
        optimizer=SGD,
        batches=global_batches(samples_for(model), GLOBAL_BATCH_ROWS),
        schedule=LinearSchedule(warmup_steps=1, decay_steps=10),
    )
    return oracle_run(replace(case, **changes))


@pytest.mark.parametrize(("model", "layout"), VARIANTS)
def test_what_a_config_says_is_what_runs(model: TinyModel, layout: LayoutCase) -> None:
    schedule = Schedule(warmup=1, total=10)

    ranks = run_ranks(
        train, layout, model, SGD, samples_for(model), schedule, num_ranks=layout.num_ranks
    )

    oracle = expected(model)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)
