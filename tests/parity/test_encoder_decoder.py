"""T5 and mT5 on every layout train as transformers does in one plain PyTorch process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, MegatronLMPlugin
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase, OracleRun
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import (
    TinyModel,
    TinyOptimizer,
    global_batches,
    pad_samples,
    translation_samples,
)
from tests.parity.test_parity import check_losses_and_norms, check_weights
from tests.parity.training import GLOBAL_BATCH_ROWS, LayoutCase, RankResult, train

SGD = TinyOptimizer("sgd", {"lr": 0.02, "momentum": 0.9})
# The queries of a T5 start small, as scores are not scaled: with an eps of 1e-8, AdamW moves them
# by the noise of small gradients, on some CPUs by half of the weights' tolerance. And behind a ReLU
# there is a gradient or none where one CPU rounds to just above 0 and another to 0, of which AdamW
# makes whole steps: it trains the models with smooth activations.
ADAMW = TinyOptimizer("adamw", {"lr": 3e-4, "weight_decay": 0.1, "eps": 1e-6})
# Four full batches of 8 and a last one of 5; encoder up to 32 and decoder up to 16 tokens.
SAMPLES = translation_samples(4 * GLOBAL_BATCH_ROWS + 5)

T5 = TinyModel("t5")
T5_SMOOTH = TinyModel("t5", changes={"feed_forward_proj": "gelu"})
# Stacks of different depths, a gated MLP, a head of its own, and a vocabulary that tp does not cut.
T5_V1_1 = TinyModel(
    "t5",
    tied=False,
    changes={"feed_forward_proj": "gated-gelu", "num_layers": 2, "num_decoder_layers": 4},
)
T5_DEEP_V1_1 = TinyModel("t5", tied=False, changes={"feed_forward_proj": "gated-gelu"})
MT5 = TinyModel("mt5", changes={"num_layers": 4, "num_decoder_layers": 2})


def split(pp: int, at: int, micro_batches: int = 4, **plugin: Any) -> LayoutCase:
    ranks = pp * plugin.get("tp_degree", 1)
    settings = {"pp_degree": pp, "pipeline_model_parallel_split_rank": at, **plugin}
    return LayoutCase(ranks, settings, micro_batches)


DIST = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**FULL, "recompute_method": "block"}
SLOW = pytest.mark.slow
# Those that stacks of 2 and of 4 layers can have; 3 stages need the 6 layers of T5.
EVEN = {
    "1": LayoutCase(1),
    "tp2": LayoutCase(2, {"tp_degree": 2}),
    "tp4": LayoutCase(4, {"tp_degree": 4}),
    "pp2": split(2, 1),
    "pp4-split2": split(4, 2),
    "tp2-pp2": split(2, 1, tp_degree=2),
    "dp2": LayoutCase(2),
    "tp2-sp": LayoutCase(2, {"tp_degree": 2, "sequence_parallelism": True}),
    "dp2-dist-opt": LayoutCase(2, DIST),
}
CASES = [
    pytest.param(LayoutCase(1), T5_SMOOTH, ADAMW, id="1-smooth"),
    pytest.param(
        split(2, 1, tp_degree=2, sequence_parallelism=True), T5_SMOOTH, ADAMW, id="tp2-pp2-sp"
    ),
    # The last stage shares one parameter with the first, and another with the one before it.
    pytest.param(split(4, 1), T5, SGD, id="pp4-split1-t5"),
    *[
        pytest.param(layout, model, optimizer, id=f"{name}-{model_name}", marks=SLOW)
        for model_name, model, optimizer in (
            ("t5", T5, SGD),
            ("v1.1", T5_V1_1, SGD),
            ("mt5", MT5, ADAMW),
        )
        for name, layout in EVEN.items()
    ],
    pytest.param(split(4, 1), T5_SMOOTH, ADAMW, id="pp4-split1-adamw", marks=SLOW),
    pytest.param(split(4, 3), T5_SMOOTH, ADAMW, id="pp4-split3", marks=SLOW),
    pytest.param(split(4, 1), T5_DEEP_V1_1, ADAMW, id="pp4-split1-v1.1", marks=SLOW),
    pytest.param(split(4, 2), T5_V1_1, ADAMW, id="pp4-split2-v1.1-adamw", marks=SLOW),
    pytest.param(split(4, 3), T5_DEEP_V1_1, ADAMW, id="pp4-split3-v1.1", marks=SLOW),
    pytest.param(
        LayoutCase(4, {**split(2, 1).plugin, **DIST}),
        T5_SMOOTH,
        ADAMW,
        id="pp2-dp2-dist-opt",
        marks=SLOW,
    ),
    pytest.param(split(2, 1, **FULL), T5, SGD, id="pp2-full-recompute", marks=SLOW),
    pytest.param(LayoutCase(1, BLOCK), T5, SGD, id="1-block-recompute", marks=SLOW),
    pytest.param(
        split(2, 1, recompute_activations=True), T5, SGD, id="pp2-selective-recompute", marks=SLOW
    ),
    pytest.param(
        LayoutCase(4, split(2, 1).plugin, 1),
        T5,
        SGD,
        id="pp2-dp2-one-micro-batch",
        marks=SLOW,
    ),
]


def expected(model: TinyModel, optimizer: TinyOptimizer) -> OracleRun:
    batches = global_batches(SAMPLES, GLOBAL_BATCH_ROWS)
    return oracle_run(OracleCase(model=model, optimizer=optimizer, batches=batches, clip=1.0))


@pytest.mark.parametrize(("layout", "model", "optimizer"), CASES)
def test_training_equals_transformers(
    layout: LayoutCase, model: TinyModel, optimizer: TinyOptimizer
) -> None:
    ranks = run_ranks(train, layout, model, optimizer, SAMPLES, num_ranks=layout.num_ranks)

    oracle = expected(model, optimizer)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)
    check_copies(ranks, layout)


def check_copies(ranks: list[RankResult], layout: LayoutCase) -> None:
    """Check that all stages hold equal position biases and embeddings, bit by bit."""
    tp = layout.plugin.get("tp_degree", 1)
    for name in ("encoder_relative", "decoder_relative", "word_embeddings"):
        for first in range(tp):
            copies = [
                value
                for rank in ranks[first::tp]
                for local, value in rank.shards.items()
                if name in local
            ]
            assert copies, name
            assert all(torch.equal(copy, copies[0]) for copy in copies), name


def one_step(plugin: dict[str, Any], batch: dict[str, torch.Tensor], model: TinyModel) -> Any:
    """Return the loss in evaluation, the exported weights before it, and an update's norm."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    hf_model = model.build()
    optimizer = torch.optim.SGD(hf_model.parameters(), lr=0.02)
    prepared, _ = accelerator.prepare(hf_model, optimizer)
    exported = prepared.gather_state_dict()
    prepared.eval()
    evaluated = prepared(**batch)
    prepared.train()
    loss = prepared(**batch).loss.item()
    return (
        type(evaluated).__name__,
        evaluated.loss.item(),
        loss,
        prepared.session.grad_norm,
        exported,
    )


def one_batch(kind: str) -> dict[str, torch.Tensor]:
    batch = pad_samples(translation_samples(4, seed=3))
    generator = torch.Generator().manual_seed(1)
    if kind == "decoder inputs":
        shape = batch["labels"].shape
        batch["decoder_input_ids"] = torch.randint(0, 99, shape, generator=generator)
        batch["decoder_attention_mask"] = torch.ones(shape, dtype=torch.int64)
        batch["decoder_attention_mask"][1, 2:5] = 0
        batch["decoder_attention_mask"][2, -4:] = 0
    elif kind == "decoder mask":
        batch["decoder_attention_mask"] = (batch["labels"] != -100).long()
        batch["decoder_attention_mask"][:, 0] = 1
    elif kind == "no mask":
        del batch["attention_mask"]
    elif kind == "left padding":
        flipped = {key: batch[key].flip(1) for key in ("input_ids", "attention_mask")}
        batch |= flipped
    return batch


@pytest.mark.parametrize(
    ("kind", "plugin", "num_ranks"),
    [
        ("decoder inputs", split(2, 1, num_micro_batches=2).plugin, 2),
        pytest.param("decoder mask", {}, 1, marks=SLOW),
        pytest.param("no mask", {"tp_degree": 2, "sequence_parallelism": True}, 2, marks=SLOW),
        pytest.param("left padding", {}, 1, marks=SLOW),
    ],
)
def test_every_kind_of_batch_means_what_it_means_to_transformers(
    kind: str, plugin: dict[str, Any], num_ranks: int
) -> None:
    batch = one_batch(kind)

    ranks = run_ranks(one_step, plugin, batch, T5_V1_1, num_ranks=num_ranks)

    case = OracleCase(T5_V1_1, TinyOptimizer("sgd", {"lr": 0.02}), [batch])
    oracle = oracle_run(case)
    hf_model = T5_V1_1.build()
    for output, evaluated, loss, norm, _ in ranks:
        assert output == "Seq2SeqLMOutput"
        assert abs(evaluated - oracle.losses[0]) <= 1e-5
        assert abs(loss - evaluated) <= 1e-5
        assert norm == pytest.approx(oracle.grad_norms[0], rel=1e-4)
    check_exported(ranks[-1][-1], hf_model)


def check_exported(exported: dict[str, torch.Tensor], hf_model: torch.nn.Module) -> None:
    wanted = dict(hf_model.named_parameters())
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], value) for name, value in wanted.items())


def saved(folder: str, plugin: dict[str, Any], model: TinyModel) -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    prepared = accelerator.prepare(model.build())
    prepared.save_pretrained(folder)


def reloaded(folder: str, plugin: dict[str, Any], model: TinyModel) -> Any:
    """Fill an empty model from a folder; return its weights, and the loss of an update."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    with torch.device("meta"):
        empty = type(model.build())(model.config())
    prepared, _ = accelerator.prepare(empty, SGD.build(empty), weights=folder)
    return prepared.gather_state_dict(), prepared(**one_batch("")).loss.item()


@pytest.mark.parametrize(
    ("model", "plugin", "num_ranks"),
    [
        pytest.param(T5_V1_1, split(2, 1).plugin, 2, id="v1.1"),
        pytest.param(MT5, split(2, 1, tp_degree=2).plugin, 4, id="mt5", marks=SLOW),
    ],
)
def test_a_saved_folder_loads_in_transformers_and_here(
    model: TinyModel, plugin: dict[str, Any], num_ranks: int, tmp_path: Any
) -> None:
    folder = str(tmp_path / "model")
    run_ranks(saved, folder, plugin, model, num_ranks=num_ranks)

    hf_model = model.build()
    loaded = type(hf_model).from_pretrained(folder)

    check_exported(dict(loaded.named_parameters()), hf_model)
    scales = [getattr(m.config, "scale_decoder_outputs", None) for m in (loaded, hf_model)]
    assert scales[0] == scales[1]
    *_, (weights, loss) = run_ranks(reloaded, folder, plugin, model, num_ranks=num_ranks)
    check_exported(weights, hf_model)
    assert abs(loss - oracle_run(OracleCase(model, SGD, [one_batch("")])).losses[0]) <= 1e-5


WITH_DROPOUT = replace(T5, changes={"dropout_rate": 0.1, "num_layers": 2, "num_decoder_layers": 2})


def dropped(plugin: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    hf_model = WITH_DROPOUT.build()
    loader = DataLoader(SAMPLES[:16], batch_size=4, collate_fn=pad_samples)
    optimizer = SGD.build(hf_model)
    prepared, _, loader = accelerator.prepare(hf_model, optimizer, loader)
    losses = [prepared(**batch).loss.item() for batch in loader]
    norms = {n: v.detach().clone() for n, v in prepared.named_parameters() if "layernorm" in n}
    prepared.eval()
    return losses, norms, [prepared(**batch).loss.item() for batch in loader]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallelism", [False, True], ids=["tp2", "tp2-sp"])
def test_dropout_keeps_replicated_weights_equal_and_is_off_in_evaluation(
    sequence_parallelism: bool,
) -> None:
    plugin = {"tp_degree": 2, "sequence_parallelism": sequence_parallelism}

    (losses, norms, first), (others, other_norms, _) = run_ranks(dropped, plugin, num_ranks=2)

    assert losses == others
    assert len(norms) == 2 * 2 + 3 * 2 + 2
    assert all(torch.equal(norms[name], other_norms[name]) for name in norms)
    quiet = replace(WITH_DROPOUT, changes={**WITH_DROPOUT.changes, "dropout_rate": 0.0})
    plain = oracle_run(OracleCase(quiet, SGD, [pad_samples(SAMPLES[:4])])).losses[0]
    assert abs(losses[0] - plain) > 1e-3
    assert len(first) == 4
