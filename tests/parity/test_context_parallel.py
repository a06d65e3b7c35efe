"""Sequences over several ranks: the numbers of one plain process, with every other axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron import Accelerator, GPTTrainStep, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.training.gpt import gpt_batch
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, global_batches
from tests.parity.test_parity import (
    SAMPLES,
    SCHEDULE,
    SGD,
    check_losses_and_norms,
    check_weights,
    expected,
)
from tests.parity.training import LayoutCase, train


def cp(size: int, ranks: int, micro_batches: int = 2, **plugin: Any) -> LayoutCase:
    return LayoutCase(ranks, {"context_parallel_size": size, **plugin}, micro_batches)


LAYOUTS = [
    pytest.param(cp(2, 2), id="cp2"),
    pytest.param(cp(4, 4), id="cp4"),
    pytest.param(cp(2, 4), id="cp2-dp2"),
    pytest.param(cp(2, 4, tp_degree=2, sequence_parallelism=True), id="cp2-tp2-sp"),
    pytest.param(cp(2, 4, 4, pp_degree=2), id="cp2-pp2"),
    pytest.param(
        cp(2, 4, 4, pp_degree=2, num_layers_per_virtual_pipeline_stage=1), id="cp2-pp2-vp2"
    ),
    pytest.param(cp(2, 4, use_distributed_optimizer=True), id="cp2-dp2-dist-opt"),
    pytest.param(cp(2, 8, 4, tp_degree=2, pp_degree=2), id="cp2-tp2-pp2", marks=pytest.mark.slow),
]
ULYSSES = {"other_megatron_args": {"cp_comm_type": "a2a"}}
GPT2 = TinyModel("gpt2")  # learned positions, tied
LLAMA = TinyModel("llama", tied=False)  # rotary positions, grouped queries
MODELS = [
    pytest.param(GPT2, id="gpt2", marks=pytest.mark.slow),
    pytest.param(LLAMA, id="llama"),
]


# Both models on the first layouts; on the others Llama, which shares their code, is slow's.
CASES = [
    pytest.param(
        layout.values[0],
        model,
        id=f"{layout.id}-{model.family}",
        marks=layout.marks or ([pytest.mark.slow] if number > 1 and model is LLAMA else []),
    )
    for number, layout in enumerate(LAYOUTS)
    for model in (GPT2, LLAMA)
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_training_equals_plain_pytorch(layout: LayoutCase, model: TinyModel) -> None:
    ranks = run_ranks(train, layout, model, SGD, SAMPLES, SCHEDULE, num_ranks=layout.num_ranks)

    oracle = expected(model, SGD)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(cp(2, 2, **ULYSSES), id="cp2"),
        pytest.param(
            cp(2, 4, tp_degree=2, sequence_parallelism=True, **ULYSSES),
            id="cp2-tp2-sp",
        ),
    ],
)
def test_exchanged_heads_equal_plain_pytorch(layout: LayoutCase, model: TinyModel) -> None:
    if "tp_degree" in layout.plugin and model is LLAMA:
        model = TinyModel("llama", tied=False, changes={"num_key_value_heads": 4})
    ranks = run_ranks(train, layout, model, SGD, SAMPLES, SCHEDULE, num_ranks=layout.num_ranks)

    oracle = expected(model, SGD)
    check_losses_and_norms(ranks, oracle)
    check_weights(ranks[-1].weights, oracle)


def left_padded() -> list[dict[str, torch.Tensor]]:
    """Batches whose padding is on the left, so that the mask cannot be left out."""
    batches = []
    for batch in global_batches(SAMPLES[:24], 8):
        lengths = batch["attention_mask"].sum(1).tolist()
        batches.append(
            {
                key: torch.stack(
                    [
                        row.roll(len(row) - length)
                        for row, length in zip(value, lengths, strict=True)
                    ]
                )
                for key, value in batch.items()
            }
        )
    return batches


def train_on(
    batches: list[dict[str, torch.Tensor]], model: TinyModel, plugin: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Update once per batch; return losses and gradient norms."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    hf_model = model.build()
    prepared, optimizer = accelerator.prepare(hf_model, SGD.build(hf_model))
    prepared.train()
    losses = [prepared(**batch).loss.item() for batch in batches[:-1]]
    norms = [optimizer.session.grad_norm]
    prepared.eval()
    losses.append(prepared(**batches[-1]).loss.item())
    return losses, norms


@pytest.mark.parametrize("more", [{}, ULYSSES], ids=["all-gather", "a2a"])
@pytest.mark.parametrize("model", MODELS)
def test_padding_on_the_left_is_hidden(model: TinyModel, more: dict[str, Any]) -> None:
    batches = left_padded()
    plugin = {"context_parallel_size": 2, **more}

    for losses, norms in run_ranks(train_on, batches, model, plugin, num_ranks=2):
        oracle = oracle_run(OracleCase(model=model, optimizer=SGD, batches=batches, clip=1.0))
        assert losses == pytest.approx(oracle.losses, abs=1e-5)
        assert norms == pytest.approx(oracle.grad_norms[-2:-1], rel=1e-4)


def packed_documents(data_iterator: Any) -> tuple[torch.Tensor, ...]:
    """A batch function whose rows hold two documents each, hidden from each other."""
    tokens, labels, loss_mask, _, positions = gpt_batch(next(data_iterator))
    length = tokens.shape[1]
    document = (torch.arange(length) >= 8).long()
    hidden = document[:, None] != document[None, :]
    hidden |= torch.ones(length, length, dtype=torch.bool).triu(1)
    return tokens, labels, loss_mask, hidden.expand(len(tokens), 1, -1, -1), positions


@pytest.mark.parametrize("more", [{}, ULYSSES], ids=["all-gather", "a2a"])
def test_packed_documents_stay_apart(more: dict[str, Any]) -> None:
    batches = global_batches(SAMPLES[:24], 8)
    plugin = {"custom_get_batch_function": packed_documents}
    (one,) = run_ranks(train_on, batches, LLAMA, plugin, num_ranks=1)
    (whole,) = run_ranks(train_on, batches, LLAMA, {}, num_ranks=1)
    plugin = {**plugin, "context_parallel_size": 2, **more}

    for losses, norms in run_ranks(train_on, batches, LLAMA, plugin, num_ranks=2):
        assert losses == pytest.approx(one[0], abs=1e-5)
        assert norms == pytest.approx(one[1], rel=1e-4)
        assert losses[0] != pytest.approx(whole[0][0], abs=1e-3)


def test_dropout_is_active_in_training_only_and_repeats_with_the_seed() -> None:
    batches = [global_batches(SAMPLES, 8)[0]] * 3
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "context_parallel_size": 2}

    first, again = (run_ranks(train_on, batches, GPT2, dropout, num_ranks=2) for _ in range(2))
    (plain, _), _ = run_ranks(train_on, batches, GPT2, {"context_parallel_size": 2}, num_ranks=2)

    assert first == again
    assert first[0] == first[1]
    losses = first[0][0]
    assert losses[0] != plain[0]
    assert losses[0] == pytest.approx(plain[0], rel=0.1)


def token_mean(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss function of two values, as the documentation shows it."""
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


@pytest.mark.parametrize("loss_function", [None, token_mean], ids=["built-in", "two-values"])
@pytest.mark.parametrize("per_token", [True, False], ids=["per-token", "per-micro-batch"])
def test_the_normalisation_does_not_depend_on_the_layout(
    per_token: bool, loss_function: Any
) -> None:
    plugin = {"calculate_per_token_loss": per_token, "custom_loss_function": loss_function}
    one = run_ranks(train, LayoutCase(1, plugin, 4), GPT2, SGD, SAMPLES, num_ranks=1)[0]
    layouts = [cp(2, 2, 4, **plugin), cp(2, 4, 2, **plugin)]

    for layout in layouts:
        for rank in run_ranks(train, layout, GPT2, SGD, SAMPLES, num_ranks=layout.num_ranks):
            assert rank.losses == pytest.approx(one.losses, rel=1e-5)
            assert rank.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


def prepare_error(plugin: dict[str, Any], model: TinyModel) -> str:
    try:
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
        hf_model = model.build()
        accelerator.prepare(hf_model, SGD.build(hf_model))
    except ConfigurationError as error:
        return str(error)
    return ""


class OwnStep(GPTTrainStep):
    """A step that does not say that its batches can be cut."""

    splits_sequences = False


@pytest.mark.parametrize(
    ("num_ranks", "plugin", "part"),
    [
        (
            2,
            {"seq_length": 30},
            "2 x context_parallel_size=2 (4); set it to 28 or 32. Nearest that works on 2 ranks: "
            "tp_degree=1, pp_degree=1, context_parallel_size=1; or ",
        ),
        (
            4,
            {"seq_length": 30, "tp_degree": 2, "sequence_parallelism": True},
            "2 x context_parallel_size=2 times tp_degree=2 under sequence_parallelism (8)",
        ),
        (
            3,
            {},
            "tp_degree=1 x context_parallel_size=2 x pp_degree=1 = 2: the number of ranks must be",
        ),
        (2, {"other_megatron_args": {"cp_comm_type": "p2p"}}, "'all_gather' or 'a2a'"),
        (
            4,
            {"tp_degree": 2, **ULYSSES},
            "must divide the model's 2 key/value heads. With tp_degree=2 on 4 ranks, "
            "context_parallel_size can be 1; or set cp_comm_type to 'all_gather'",
        ),
        (
            2,
            {"custom_train_step_class": OwnStep},
            "splits_sequences = True on its class; else set context_parallel_size to 1. Nearest "
            "that works on 2 ranks: tp_degree=1, pp_degree=1, context_parallel_size=1; or ",
        ),
    ],
    ids=["length", "length-with-sp", "world", "ring", "heads", "own-step"],
)
def test_what_cannot_be_split_is_refused(num_ranks: int, plugin: dict[str, Any], part: str) -> None:
    plugin = {"context_parallel_size": 2, **plugin}
    for error in run_ranks(prepare_error, plugin, LLAMA, num_ranks=num_ranks):
        assert part in error
