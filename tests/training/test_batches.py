"""Batches as Hugging Face means them: labels, masks, positions; and batches made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_megatron.errors import BatchError, TrainingLoopError
from accelerate_megatron.training.gpt import causal_padding_mask, gpt_batch
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase, OracleRun
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS, TWO_LLAMA_LAYERS, start, weights_of

MODELS = [
    pytest.param(TWO_LAYERS, id="gpt2"),
    pytest.param(TWO_LLAMA_LAYERS, id="llama"),
]
Batch = dict[str, torch.Tensor]


def update_with(recipe: TinyModel, batch: Batch, plugin: dict[str, Any]) -> Any:
    """Make one update with a batch that does not come from a loader."""
    started = start(recipe, **plugin)
    loss = started.model(**batch).loss.item()
    return loss, started.model.session.grad_norm


def expected(recipe: TinyModel, batch: Batch) -> OracleRun:
    return oracle_run(OracleCase(recipe, SGD, [batch]))


def check_equal_to_oracle(ranks: list[Any], oracle: OracleRun) -> None:
    assert set(ranks) == {ranks[0]}
    assert ranks[0][0] == pytest.approx(oracle.losses[0], abs=1e-5)
    assert ranks[0][1] == pytest.approx(oracle.grad_norms[0], rel=1e-4)


# --- Hugging Face's meaning ----------------------------------------------------------------


def left_padded() -> Batch:
    batch = pad_samples(ragged_samples(4))
    for row in range(4):
        shift = int((batch["attention_mask"][row] == 0).sum())
        for key in batch:
            batch[key][row] = batch[key][row].roll(shift)
    return batch


def with_holes() -> Batch:
    batch = pad_samples(ragged_samples(4))
    batch["attention_mask"][:, 3:6] = 0
    batch["attention_mask"][1, 8] = 0
    return batch


def with_labels_on_padding() -> Batch:
    batch = pad_samples(ragged_samples(4))
    batch["labels"] = batch["input_ids"].clone()
    return batch


def left_padded_with_labels_on_padding() -> Batch:
    batch = left_padded()
    batch["labels"] = batch["input_ids"].clone()
    return batch


BATCHES = {
    "left-padded": left_padded,
    "holes": with_holes,
    "labels-on-padding": with_labels_on_padding,
    "left-padded-labels-on-padding": left_padded_with_labels_on_padding,
}


@pytest.mark.parametrize("recipe", MODELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_masks_and_labels_mean_what_they_mean_to_hugging_face(
    batch: str, recipe: TinyModel
) -> None:
    values = BATCHES[batch]()

    ranks = run_ranks(update_with, recipe, values, {"tp_degree": 2}, num_ranks=2)

    check_equal_to_oracle(ranks, expected(recipe, values))


def test_gpt2_takes_positions_of_the_batch() -> None:
    batch = pad_samples(ragged_samples(4))
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).flip(0).repeat(4, 1)

    ranks = run_ranks(update_with, TWO_LAYERS, batch, {"pp_degree": 2}, num_ranks=2)

    check_equal_to_oracle(ranks, expected(TWO_LAYERS, batch))


def test_a_model_with_rotary_positions_takes_the_positions_it_counts_itself() -> None:
    batch = pad_samples(ragged_samples(4))
    positions = torch.arange(batch["input_ids"].shape[1]).repeat(4, 1)
    batch["position_ids"] = positions * batch["attention_mask"]  # padding has any position

    ranks = run_ranks(update_with, TWO_LLAMA_LAYERS, batch, {}, num_ranks=1)

    check_equal_to_oracle(ranks, expected(TWO_LLAMA_LAYERS, batch))


def test_a_model_with_rotary_positions_takes_those_of_the_batch() -> None:
    batch = pad_samples(ragged_samples(4))
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).repeat(4, 1)
    batch["position_ids"][2, 5:] -= 5  # two documents in one row

    ranks = run_ranks(update_with, TWO_LLAMA_LAYERS, batch, {"tp_degree": 2}, num_ranks=2)

    check_equal_to_oracle(ranks, expected(TWO_LLAMA_LAYERS, batch))


def test_labels_are_shifted_to_the_token_that_predicts_them() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8]]),
        "labels": torch.tensor([[5, -100, 7, 8]]),
    }

    tokens, labels, loss_mask, attention_mask, positions = gpt_batch(batch)

    assert tokens.tolist() == [[5, 6, 7, 8]]
    assert loss_mask.tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert labels.tolist() == [[0, 7, 8, 0]]  # 0 where the label does not count
    assert attention_mask is None
    assert positions.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("mask", "counts", "hidden"),
    [
        ([1, 1, 1], [1, 1, 0], None),
        ([1, 1, 0], [1, 0, 0], None),
        ([1, 1, 0], [1, 1, 1], [[0, 1, 1], [0, 0, 1], [0, 0, 1]]),
        ([0, 1, 1], [0, 1, 0], [[1, 1, 1], [1, 0, 1], [1, 0, 0]]),
        ([1, 0, 1], [1, 0, 0], [[0, 1, 1], [0, 1, 1], [0, 1, 0]]),
    ],
    ids=["nothing padded", "right", "right but it counts", "left", "hole"],
)
def test_a_mask_is_made_only_where_the_causal_one_is_not_enough(
    mask: list[int], counts: list[int], hidden: list[list[int]] | None
) -> None:
    made = causal_padding_mask(torch.tensor([mask]), torch.tensor([counts]).bool())

    assert (made is None) == (hidden is None)
    if made is not None:
        assert made[0, 0].int().tolist() == hidden


# --- batches made by hand ------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 3], ids=["even", "odd"])
def test_a_batch_made_by_hand_is_cut_into_micro_batches(rows: int) -> None:
    batch = pad_samples(ragged_samples(rows))
    plugin = {"pp_degree": 2, "num_micro_batches": 2}

    ranks = run_ranks(update_with, TWO_LAYERS, batch, plugin, num_ranks=2)

    check_equal_to_oracle(ranks, expected(TWO_LAYERS, batch))


def update_with_replicas_part(recipe: TinyModel, batch: Batch, plugin: dict[str, Any]) -> Any:
    rows = 2 * dist.get_rank()
    mine = {key: value[rows : rows + 2] for key, value in batch.items()}
    return update_with(recipe, mine, plugin)


def test_replicas_may_have_different_batches_made_by_hand() -> None:
    batch = pad_samples(ragged_samples(4))

    ranks = run_ranks(update_with_replicas_part, TWO_LAYERS, batch, {}, num_ranks=2)

    check_equal_to_oracle(ranks, expected(TWO_LAYERS, batch))


def test_different_batches_on_ranks_of_one_replica_are_refused_alike() -> None:
    batch = pad_samples(ragged_samples(4))

    errors = run_ranks(
        update_with_replicas_part, TWO_LAYERS, batch, {"tp_degree": 2}, num_ranks=2, errors="return"
    )

    assert {type(error) for error in errors} == {BatchError}
    assert len({str(error) for error in errors}) == 1
    assert "differs between the ranks of one data-parallel replica" in str(errors[0])


def refusals(cases: dict[str, Batch]) -> dict[str, str]:
    """Return what the model says to each batch; rank 0 alone gets the bad one."""
    good = pad_samples(ragged_samples(4))
    started = start(num_micro_batches=2, pp_degree=2)
    before = weights_of(started.model)
    told = {}
    for name, changes in cases.items():
        batch = {**good, **changes} if dist.get_rank() == 0 else good
        try:
            started.model(**{key: value for key, value in batch.items() if value is not None})
        except BatchError as error:
            told[name] = str(error)
    assert all(
        torch.equal(value, before[name]) for name, value in weights_of(started.model).items()
    )
    return told


REFUSED = {
    "id beyond": (
        {"input_ids": torch.full((4, 24), 99)},
        "input_ids holds 99, but the vocabulary has 99",
    ),
    "id below": ({"input_ids": torch.full((4, 24), -1)}, "input_ids holds -1"),
    "label beyond": ({"labels": torch.full((4, 24), 120)}, "labels holds 120"),
    "label below": ({"labels": torch.full((4, 24), -1)}, "labels holds -1"),
    "no labels": ({"labels": None}, "The batch has no labels"),
    "other shape": (
        {"labels": torch.zeros(4, 23, dtype=torch.long)},
        "labels has the shape [4, 23]",
    ),
    "too long": (
        {
            key: torch.ones(4, 65, dtype=torch.long)
            for key in ("input_ids", "labels", "attention_mask")
        },
        "65 tokens, but the model has 64 positions",
    ),
    "mask of numbers": (
        {"attention_mask": torch.full((4, 24), 2)},
        "attention_mask holds the value 2",
    ),
    "floats": ({"input_ids": torch.ones(4, 24)}, "input_ids has the dtype torch.float32"),
    "a list": ({"labels": [[1, 2]]}, "labels is a list"),
}


def test_a_bad_batch_of_one_rank_is_refused_alike_on_all() -> None:
    assert pad_samples(ragged_samples(4))["input_ids"].shape == (4, 24)

    ranks = run_ranks(refusals, {name: bad for name, (bad, _) in REFUSED.items()}, num_ranks=2)

    assert ranks[0] == ranks[1]
    for name, (_, message) in REFUSED.items():
        assert message in ranks[0].get(name, "nothing was said"), name
        assert ranks[0][name].startswith("rank 0: ")


def change_batches_of_the_loader() -> dict[str, str]:
    started = start()
    told = {}
    for name in ("labels", "attention_mask"):
        batch = next(iter(started.loader))
        batch[name][0, 0] = 120
        try:
            started.model(**batch)
        except BatchError as error:
            told[name] = str(error)
    return told


def test_a_batch_of_the_loader_is_checked_again_when_it_was_changed() -> None:
    (told,) = run_ranks(change_batches_of_the_loader, num_ranks=1)

    assert "labels holds 120" in told["labels"]
    assert "attention_mask holds the value 120" in told["attention_mask"]


def call_with(changes: dict[str, Any]) -> None:
    started = start()
    batch = next(iter(started.loader))
    started.model(**{**batch, **changes})


def test_a_key_that_the_train_step_does_not_read_is_refused_by_name() -> None:
    message = "The batch has token_type_ids, which GPTTrainStep does not read; it reads input_ids"
    with pytest.raises(BatchError, match=message):
        run_ranks(call_with, {"token_type_ids": torch.zeros(2, 23)}, num_ranks=1)


def call_with_a_key_on_the_last_rank() -> None:
    started = start()
    batch = next(iter(started.loader))
    is_last = started.accelerator.process_index == started.accelerator.num_processes - 1
    started.model(**batch, **({"extra": batch["input_ids"]} if is_last else {}))


def test_a_key_of_one_rank_alone_is_refused_alike_on_all() -> None:
    with pytest.raises(BatchError, match=r"rank 1: The batch has extra, which GPTTrainStep"):
        run_ranks(call_with_a_key_on_the_last_rank, num_ranks=2)


def evaluate_on_the_first_rank() -> None:
    started = start()
    batch = next(iter(started.loader))
    started.model.train(started.accelerator.process_index != 0)
    started.model(**batch)


def test_ranks_that_train_and_ranks_that_evaluate_are_told_so() -> None:
    with pytest.raises(TrainingLoopError, match="for an evaluation on rank 0 and for an update"):
        run_ranks(evaluate_on_the_first_rank, num_ranks=2)


def call_in_other_forms() -> list[float]:
    started = start()
    started.model.eval()
    batch = next(iter(started.loader))
    ids = batch.pop("input_ids")
    return [
        started.model(ids, **batch).loss.item(),
        started.model(input_ids=ids, **batch).loss.item(),
        started.model(**batch, input_ids=ids)[0].item(),
    ]


def test_ids_are_taken_by_position_and_by_name() -> None:
    (losses,) = run_ranks(call_in_other_forms, num_ranks=1)

    assert len(set(losses)) == 1
