"""Train steps of a user's own, in the forms that Accelerate documents."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from accelerate_megatron import (
    AbstractTrainStep,
    GPTTrainStep,
    avg_losses_across_data_parallel_group,
)
from accelerate_megatron.training.gpt import gpt_batch, token_loss
from tests.helpers.oracle import oracle_run
from tests.helpers.oracle_training import OracleCase
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS, start

SAMPLES = ragged_samples(8)


class DocumentedStep(GPTTrainStep):
    """As in Accelerate's guide: one argument, `get_loss_func(self)`, the inputs bound too."""

    def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
        super().__init__(megatron_args)
        self.kwargs = kwargs

    def get_loss_func(self) -> Any:  # type: ignore[override]
        def loss_func(inputs: Any, loss_mask: Any, output_tensor: Any) -> Any:
            losses = output_tensor.float().view(-1) * loss_mask.view(-1)
            loss = self.kwargs["factor"] * losses.sum() / loss_mask.sum()
            averaged = avg_losses_across_data_parallel_group([loss])
            return loss, {"lm loss": averaged[0]}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            tokens, labels, loss_mask, mask, positions = self.get_batch(data_iterator)
            output = model(tokens, positions, mask, labels=labels)
            return output, partial(self.loss_func, tokens, loss_mask)

        return forward_step


class StepWithAccelerator(GPTTrainStep):
    """As Accelerate's own steps: `(accelerator, args)`."""

    def __init__(self, accelerator: Any, args: Any, factor: float) -> None:
        self.factor = factor
        super().__init__(accelerator, args)

    def get_loss_func(self, accelerator: Any) -> Any:
        assert accelerator.state.megatron_lm_plugin is not None

        def loss_func(loss_mask: Any, output: Any) -> Any:
            total, count, report = token_loss(loss_mask, output)
            factors = torch.tensor([self.factor, 1.0])
            return self.factor * total, count, {"lm loss": report["lm loss"] * factors}

        return loss_func


class OwnStep(AbstractTrainStep):
    """From the abstract class: all three functions, reading keys of its own."""

    def __init__(self, accelerator: Any, args: Any, factor: float) -> None:
        super().__init__("OwnStep")
        self.factor = factor
        self.get_batch = self.get_batch_func(accelerator, False)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        return lambda iterator: next(iterator)

    def get_loss_func(self, accelerator: Any) -> Any:
        return token_loss

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            batch = self.get_batch(data_iterator)
            weights = batch["factors"][:, None] * self.factor
            tokens, labels, loss_mask, mask, positions = gpt_batch(batch)
            output = model(tokens, positions, mask, labels=labels)
            return output * weights, partial(self.loss_func, loss_mask)

        return forward_step


def update(plugin: dict[str, Any], extra: dict[str, torch.Tensor] | None = None) -> Any:
    started = start(samples=SAMPLES, batch_size=2, num_micro_batches=2, **plugin)
    batch = next(iter(started.loader))
    loss = started.model(**batch, **(extra or {})).loss.item()
    return loss, started.model.session.grad_norm


def check(ranks: list[Any], factor: float) -> None:
    oracle = oracle_run(OracleCase(TWO_LAYERS, SGD, [pad_samples(SAMPLES)]))
    assert len(set(ranks)) == 1
    assert ranks[0][0] == pytest.approx(factor * oracle.losses[0], abs=1e-4)
    assert ranks[0][1] == pytest.approx(factor * oracle.grad_norms[0], rel=1e-4)


@pytest.mark.parametrize("step_class", [DocumentedStep, StepWithAccelerator])
def test_a_step_class_is_built_in_either_documented_form(step_class: Any) -> None:
    plugin = {"custom_train_step_class": step_class, "custom_train_step_kwargs": {"factor": 0.5}}
    if step_class is DocumentedStep:  # its report is a mean over replicas, not over tokens
        ranks = run_ranks(update, plugin | {"tp_degree": 2}, num_ranks=2)
        oracle = oracle_run(OracleCase(TWO_LAYERS, SGD, [pad_samples(SAMPLES[:4])]))
        assert ranks[0][0] == pytest.approx(0.5 * oracle.losses[0], abs=1e-4)
        assert ranks[0][1] == pytest.approx(0.5 * oracle.grad_norms[0], rel=1e-4)
    else:
        check(run_ranks(update, plugin, num_ranks=2), 0.5)


def test_a_step_of_ones_own_reads_keys_of_its_own() -> None:
    plugin = {
        "custom_train_step_class": OwnStep,
        "custom_train_step_kwargs": {"factor": 0.25},
    }

    ranks = run_ranks(update, plugin, {"factors": torch.full((4,), 2.0)}, num_ranks=2)

    check(ranks, 0.5)


def set_on_the_state() -> Any:
    from accelerate_megatron import Accelerator, MegatronLMPlugin

    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    plugin = accelerator.state.megatron_lm_plugin
    plugin.custom_train_step_class = StepWithAccelerator
    plugin.custom_train_step_kwargs = {"factor": 3.0}
    model = accelerator.prepare(TWO_LAYERS.build())
    model.eval()
    return model(**pad_samples(SAMPLES)).loss.item()


def test_a_step_class_can_be_set_after_the_accelerator_was_made() -> None:
    (loss,) = run_ranks(set_on_the_state, num_ranks=1)

    oracle = oracle_run(OracleCase(TWO_LAYERS, SGD, [pad_samples(SAMPLES)]))
    assert loss == pytest.approx(3 * oracle.losses[0], abs=1e-4)


def get_batch_without_labels(data_iterator: Any) -> Any:
    batch = next(data_iterator)
    assert set(batch) == {"input_ids", "prompt_lengths"}
    ids = batch["input_ids"]
    is_prompt = torch.arange(ids.shape[1]) < batch["prompt_lengths"][:, None]
    return gpt_batch({"input_ids": ids, "labels": ids.masked_fill(is_prompt, -100)})


def update_without_labels() -> Any:
    started = start(custom_get_batch_function=get_batch_without_labels)
    ids = torch.arange(40).reshape(4, 10)
    lengths = torch.tensor([0, 3, 5, 9])
    loss = started.model(input_ids=ids, prompt_lengths=lengths).loss.item()
    return loss, started.model.session.grad_norm


def test_a_batch_function_of_ones_own_may_make_the_labels() -> None:
    (result,) = run_ranks(update_without_labels, num_ranks=1)

    ids = torch.arange(40).reshape(4, 10)
    labels = ids.clone()
    for row, length in enumerate([0, 3, 5, 9]):
        labels[row, :length] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    oracle = oracle_run(OracleCase(TWO_LAYERS, SGD, [batch]))
    assert result[0] == pytest.approx(oracle.losses[0], abs=1e-5)
    assert result[1] == pytest.approx(oracle.grad_norms[0], rel=1e-4)
