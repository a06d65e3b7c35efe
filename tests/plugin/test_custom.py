"""Functions of the user's own: model provider, prepare function; what train steps see as args."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_megatron import GPTTrainStep, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError, WeightsError
from accelerate_megatron.training.gpt import gpt_batch
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import TWO_LAYERS, start

SAMPLES = ragged_samples(8)
BATCH = pad_samples(SAMPLES)
built: list[tuple[bool, bool]] = []


def own_model(pre_process: bool = True, post_process: bool = True, config: Any = None) -> Any:
    """Return a plain GPTModel of Megatron-Core."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    built.append((pre_process, post_process))
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=128,
        max_sequence_length=64,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
    )


def own_chunks(model_provider: Any) -> list[torch.nn.Module]:
    """Return what Megatron's own get_model would."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = model_provider()
    return [DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)]


def own_modules(model_provider: Any) -> list[torch.nn.Module]:
    return [model_provider()]


def without_names(pre_process: bool, post_process: bool, config: Any) -> Any:
    model = own_model(pre_process, post_process, config)
    model.extra = torch.nn.Linear(3, 3)
    return model


def updates(plugin: dict[str, Any]) -> Any:
    started = start(TWO_LAYERS, samples=SAMPLES, batch_size=4, num_micro_batches=2, **plugin)
    values = [started.model(**BATCH).loss.item() for _ in range(3)]
    return values, built, type(started.model.session.chunks[0].module).__name__


@pytest.mark.parametrize("layout", [{}, {"pp_degree": 2}], ids=["1", "pp2"])
def test_a_model_provider_builds_the_stages_and_gets_the_weights(layout: dict[str, Any]) -> None:
    num_ranks = layout.get("pp_degree", 1)
    custom = {**layout, "custom_model_provider_function": own_model}

    results = run_ranks(updates, custom, num_ranks=num_ranks)
    plain = run_ranks(updates, layout, num_ranks=num_ranks)

    stages = [place for _, [place], _ in results]
    assert stages == ([(True, True)] if num_ranks == 1 else [(True, False), (False, True)])
    assert {name for *_, name in results} == {"GPTModel"}
    # Its loss has the padded rows of the vocabulary in it, 99 tokens of 128: so only near.
    assert results[0][0] == pytest.approx(plain[0][0], abs=0.5)
    assert results[0][0][2] < results[0][0][0]


def test_a_prepare_function_is_given_the_provider_and_wraps_the_chunks() -> None:
    custom = {
        "custom_model_provider_function": own_model,
        "custom_prepare_model_function": own_chunks,
    }
    provider_only = {"custom_model_provider_function": own_model}

    [(values, places, _)] = run_ranks(updates, custom, num_ranks=1)
    [(wanted, *_)] = run_ranks(updates, provider_only, num_ranks=1)

    assert places == [(True, True)]
    assert values == pytest.approx(wanted, abs=1e-5)


def test_chunks_that_are_not_wrapped_are_refused() -> None:
    custom = {
        "custom_model_provider_function": own_model,
        "custom_prepare_model_function": own_modules,
    }

    with pytest.raises(ConfigurationError, match="each in Megatron-Core's"):
        run_ranks(updates, custom, num_ranks=1)


def test_a_prepare_function_needs_a_provider() -> None:
    with pytest.raises(ConfigurationError, match="without custom_model_provider_function"):
        MegatronLMPlugin(custom_prepare_model_function=own_chunks)


def test_a_module_with_parameters_of_its_own_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"extra.*not in the table"):
        run_ranks(updates, {"custom_model_provider_function": without_names}, num_ranks=1)


# --- args ------------------------------------------------------------------------------

seen: list[Any] = []


class SeeingStep(GPTTrainStep):
    def __init__(self, megatron_args: Any, note: str) -> None:
        super().__init__(megatron_args)
        seen[:] = [megatron_args, note]


def args_of_a_run() -> Any:
    started = start(
        TWO_LAYERS,
        samples=SAMPLES,
        batch_size=2,
        num_micro_batches=2,
        recompute_activations=True,
        consumed_samples=[4],
        custom_train_step_class=SeeingStep,
        custom_train_step_kwargs={"note": "hello"},
        other_megatron_args={"tokenizer_type": "GPT2BPETokenizer", "eos_token_id": 7},
    )
    args, note = seen
    before = args.consumed_train_samples
    for batch in started.loader:
        started.model(**batch)
    errors = []
    for action in (lambda: args.micro_batchsize, lambda: setattr(args, "seq_length", 1)):
        try:
            action()
        except AttributeError as error:
            errors.append(str(error))
    shown = started.accelerator.state.megatron_lm_plugin.megatron_lm_default_args
    names = (
        *("micro_batch_size", "global_batch_size", "seq_length", "padded_vocab_size"),
        *("orig_vocab_size", "eos_token_id", "tensor_model_parallel_size", "model_type_name"),
        *("tokenizer_type", "num_labels", "pretraining_flag", "bert_binary_head"),
        *("model_return_dict", "num_layers", "lr", "clip_grad", "recompute_granularity"),
    )
    values = {name: getattr(args, name) for name in names}
    same = all(shown[name] == value for name, value in values.items())
    return note, values, (before, args.consumed_train_samples), errors, same


def test_a_step_sees_the_resolved_run_under_megatrons_names() -> None:
    [(note, values, consumed, errors, same)] = run_ranks(args_of_a_run, num_ranks=1)

    assert note == "hello"
    assert values == {
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "seq_length": 64,
        "padded_vocab_size": 128,
        "orig_vocab_size": 99,
        "eos_token_id": 7,
        "tensor_model_parallel_size": 1,
        "model_type_name": "gpt2",
        "tokenizer_type": "GPT2BPETokenizer",
        "num_labels": 2,
        "pretraining_flag": True,
        "bert_binary_head": False,
        "model_return_dict": True,
        "num_layers": 2,
        "lr": 0.1,
        "clip_grad": 1.0,
        "recompute_granularity": "selective",
    }
    assert consumed == (4, 8)  # 4 of 8 samples were left
    assert "did you mean micro_batch_size" in errors[0]
    assert "args.seq_length cannot be set" in errors[1]
    assert same


class StepOfTwoSources(GPTTrainStep):
    """Takes the labels of Megatron's datasets as shifted already, those of a DataLoader not."""

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        def get_batch(data_iterator: Any) -> Any:
            batch = next(data_iterator)
            name = "shift_labels" if megatron_dataset_flag else "labels"
            return gpt_batch({"input_ids": batch["input_ids"], name: batch["labels"]})

        return get_batch


IDS = torch.arange(24).reshape(2, 12)
SHIFTED = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], dim=1)


def loss_of_a_source(flag: bool) -> float:
    started = start(
        TWO_LAYERS, custom_train_step_class=StepOfTwoSources, megatron_dataset_flag=flag
    )
    started.model.eval()
    labels = SHIFTED if flag else IDS
    loss: float = started.model(input_ids=IDS, labels=labels).loss.item()
    return loss


@pytest.mark.parametrize("flag", [True, False])
def test_a_step_of_ones_own_is_told_where_its_batches_come_from(flag: bool) -> None:
    [loss] = run_ranks(loss_of_a_source, flag, num_ranks=1)

    with torch.no_grad():
        wanted = float(TWO_LAYERS.build().eval()(input_ids=IDS, labels=IDS).loss)
    assert loss == pytest.approx(wanted, abs=1e-5)


# --- consumed samples ------------------------------------------------------------------


def first_rows(consumed: list[int]) -> Any:
    started = start(
        TWO_LAYERS, samples=SAMPLES, batch_size=1, num_micro_batches=2, consumed_samples=consumed
    )
    rows = [
        [
            ids[mask.bool()].tolist()
            for ids, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
        ]
        for b in started.loader
    ]
    again = sum(1 for _ in started.loader)
    return rows, again, consumed


@pytest.mark.parametrize(
    ("consumed", "steps_left"), [([0], 2), ([4], 1), ([8], 2), ([12, 0, 4], 1)]
)
def test_consumed_samples_are_skipped_once(consumed: list[int], steps_left: int) -> None:
    results = run_ranks(first_rows, consumed, num_ranks=2)

    whole = run_ranks(first_rows, [0], num_ranks=2)
    for (rows, again, list_of_caller), (all_rows, *_) in zip(results, whole, strict=True):
        assert rows == all_rows[2 - steps_left :]
        assert again == 2
        assert list_of_caller == consumed


@pytest.mark.parametrize(
    ("consumed", "message"),
    [([3], "must be a multiple: 0 or 4"), ([1, 2, 3, 4], "1 to 3 whole numbers"), ("8", "1 to 3")],
)
def test_other_numbers_of_samples_are_refused(consumed: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_ranks(first_rows, consumed, num_ranks=2)
