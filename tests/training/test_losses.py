"""Loss functions in any documented form, and micro-batches in which nothing counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from accelerate_megatron import avg_losses_across_data_parallel_group
from accelerate_megatron.errors import TrainingLoopError
from accelerate_megatron.training.loss import counted_loss
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS, gradient_of, start

SAMPLES = ragged_samples(8, min_length=4)


def masked_mean(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """Megatron's documented loss function of two values; 0 / 0 where nothing counts."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.float().view(-1) * mask) / mask.sum()
    averaged = avg_losses_across_data_parallel_group([loss])
    return loss, {"lm loss": averaged[0]}


def own_mean(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    loss = (output * loss_mask).sum() / loss_mask.sum()
    return loss, {"loss": loss.detach()}


def masked_sum(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    total = (output.float() * loss_mask).sum()
    count = loss_mask.sum()
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}


LOSSES = {"default": None, "two": masked_mean, "two-own": own_mean, "three": masked_sum}


def one_update(loss: str, samples: Any, batch_size: int, plugin: dict[str, Any]) -> Any:
    started = start(
        samples=samples,
        batch_size=batch_size,
        gradient_clipping=0.0,
        custom_loss_function=LOSSES[loss],
        **plugin,
    )
    before = started.model.gather_state_dict()
    if before is not None:
        before = {name: value.clone() for name, value in before.items()}
    outputs = started.model(**next(iter(started.loader)))
    return (
        outputs.loss.item(),
        started.model.session.grad_norm,
        gradient_of(started, before),
    )


def expected_update(samples: Any, batches: Any = None) -> Any:
    case = OracleCase(TWO_LAYERS, SGD, batches or [pad_samples(samples)], clip=None)
    return oracle_run(case)


@pytest.mark.parametrize(
    ("loss", "num_ranks", "plugin", "batch_size"),
    [
        ("two", 1, {}, 8),
        ("two", 2, {"num_micro_batches": 2}, 2),
        ("two-own", 1, {"num_micro_batches": 2}, 4),
        ("two-own", 1, {"num_micro_batches": 4}, 2),
        ("two-own", 2, {}, 4),
        ("two-own", 2, {"pp_degree": 2, "num_micro_batches": 4}, 2),
        ("three", 2, {"num_micro_batches": 2}, 2),
    ],
    ids=["two-1", "two-dp2-micro2", "own-micro2", "own-micro4", "own-dp2", "own-pp2", "three"],
)
def test_a_loss_function_of_ones_own_gives_the_token_mean_however_the_batch_is_cut(
    loss: str, num_ranks: int, plugin: dict[str, Any], batch_size: int
) -> None:
    *_, (value, norm, gradients) = run_ranks(
        one_update, loss, SAMPLES, batch_size, plugin, num_ranks=num_ranks
    )

    oracle = expected_update(SAMPLES)
    assert norm == pytest.approx(oracle.grad_norms[0], rel=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, oracle.first_grads[name], rtol=1e-3, atol=2e-5)
    if loss != "two" or num_ranks == 1:  # that one reports a mean over replicas, unweighted
        assert value == pytest.approx(oracle.losses[0], abs=1e-5)


@pytest.mark.parametrize("loss", ["default", "two", "two-own", "three"])
@pytest.mark.parametrize("num_samples", [3, 2], ids=["one-row", "no-row"])
def test_a_short_last_batch_has_no_weight_beyond_its_rows(loss: str, num_samples: int) -> None:
    samples = SAMPLES[:num_samples]  # of 2 ranks x 2 micro-batches x 2 rows: the second lacks some

    *_, (value, norm, _) = run_ranks(
        one_update, loss, samples, 2, {"num_micro_batches": 2}, num_ranks=2
    )

    oracle = expected_update(samples)
    assert norm == pytest.approx(oracle.grad_norms[0], rel=1e-4)
    if loss != "two" or num_samples == 2:  # a mean over replicas, of those that have one
        assert value == pytest.approx(oracle.losses[0], abs=1e-5)


def mean_of_means(samples: Any, rows: int) -> Any:
    """Return loss and gradient norm of the mean of micro-batches' means, in plain torch."""
    model = TWO_LAYERS.build()
    parts = [samples[start : start + rows] for start in range(0, len(samples), rows)]
    losses = []
    for part in parts:
        batch = pad_samples(part)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        losses.append(
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            )
        )
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("loss", ["default", "two-own", "three"])
@pytest.mark.parametrize(
    ("num_ranks", "num_samples"), [(1, 8), (2, 8), (2, 5)], ids=["1", "dp2", "dp2-short"]
)
def test_without_per_token_loss_it_is_the_mean_of_the_micro_batches_means(
    loss: str, num_ranks: int, num_samples: int
) -> None:
    plugin = {"calculate_per_token_loss": False, "num_micro_batches": 4 // num_ranks}
    samples = SAMPLES[:num_samples]

    *_, (value, norm, _) = run_ranks(one_update, loss, samples, 2, plugin, num_ranks=num_ranks)

    wanted_loss, wanted_norm = mean_of_means(samples, 2)
    assert value == pytest.approx(wanted_loss, abs=1e-5)
    assert norm == pytest.approx(wanted_norm, rel=1e-4)


def _masked(samples: Any, which: Any) -> Any:
    return [
        {**sample, "labels": torch.full_like(sample["labels"], -100)} if index in which else sample
        for index, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("loss", ["default", "two-own"])
@pytest.mark.parametrize("without_labels", [{0, 1}, {0, 1, 4, 5}], ids=["micro-batch", "replica"])
def test_rows_without_labels_contribute_nothing(loss: str, without_labels: set[int]) -> None:
    samples = _masked(SAMPLES, without_labels)

    results = run_ranks(one_update, loss, samples, 2, {"num_micro_batches": 2}, num_ranks=2)

    oracle = expected_update(samples)
    assert {value for value, *_ in results} == {results[0][0]}
    assert results[0][0] == pytest.approx(oracle.losses[0], abs=1e-5)
    assert results[0][1] == pytest.approx(oracle.grad_norms[0], rel=1e-4)


@pytest.mark.parametrize("per_token", [True, False])
def test_a_batch_without_any_label_changes_nothing(per_token: bool) -> None:
    samples = _masked(SAMPLES, range(8))
    plugin = {"num_micro_batches": 2, "calculate_per_token_loss": per_token}

    *_, (value, norm, gradients) = run_ranks(one_update, "default", samples, 2, plugin, num_ranks=2)

    assert (value, norm) == (0.0, 0.0)
    assert all(not gradient.any() for gradient in gradients.values())


# --- the form in which the session gets them --------------------------------------------

OUTPUT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def test_a_mean_becomes_a_sum_and_its_count() -> None:
    total, count, report = counted_loss(partial(own_mean, MASK), OUTPUT)

    assert (total.item(), count.item(), report["loss"].tolist()) == (6.0, 3, [6.0, 3.0])


def test_the_mask_is_found_behind_other_bound_tensors() -> None:
    def with_inputs(inputs: Any, loss_mask: Any, output: Any) -> Any:
        return own_mean(loss_mask, output)

    def by_name(output: Any, loss_mask: Any) -> Any:
        return own_mean(loss_mask, output)

    inputs = torch.full((2, 2), 7)

    assert counted_loss(partial(with_inputs, inputs, MASK), OUTPUT)[1].item() == 3
    assert counted_loss(partial(by_name, loss_mask=MASK), OUTPUT)[1].item() == 3


@pytest.mark.parametrize(
    "loss_func",
    [
        lambda output: (output.mean(), {"lm loss": output.mean()}),
        partial(own_mean, torch.ones(3, 2)),
    ],
    ids=["in a closure", "of another shape"],
)
def test_a_mean_without_a_mask_to_count_is_refused(loss_func: Any) -> None:
    with pytest.raises(TrainingLoopError, match=r"not over how many tokens.*functools\.partial"):
        counted_loss(loss_func, OUTPUT[:1])


def test_a_mean_over_nothing_is_zero_with_no_gradient() -> None:
    output = OUTPUT.clone().requires_grad_()

    total, count, report = counted_loss(partial(own_mean, torch.zeros(2, 2)), output)
    total.backward()

    assert (total.item(), count.item(), report["loss"].tolist()) == (0.0, 0, [0.0, 0.0])
    assert output.grad is not None
    assert not output.grad.any()


def test_a_single_number_reported_with_a_sum_is_its_mean() -> None:
    def with_mean(output: Any) -> Any:
        return output.sum(), torch.tensor(4), {"lm loss": output.mean()}

    assert counted_loss(with_mean, OUTPUT)[2]["lm loss"].tolist() == [10.0, 4.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(()), r"returned Tensor; it has to return \(loss, report\)"),
        ((1, 2, 3, 4), "returned tuple of 4 values"),
        ((torch.ones(()), {}), "reported nothing"),
    ],
)
def test_another_form_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(TrainingLoopError, match=message):
        counted_loss(lambda _: returned, OUTPUT)
