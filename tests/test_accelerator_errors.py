"""What cannot work is refused alike on all ranks, before any collective, with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, GPT2Model

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError, RanksDisagreeError, UnsupportedError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS, start


def construct(of_rank: list[dict[str, Any]]) -> None:
    plugin = of_rank[dist.get_rank() % len(of_rank)]
    Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))


def prepare(of_rank: list[Any], plugin: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**plugin))
    recipe = of_rank[dist.get_rank() % len(of_rank)]
    model = recipe.build() if isinstance(recipe, TinyModel) else recipe()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def check_alike(errors: list[Any], kind: type[Exception], *messages: str) -> None:
    assert [type(error) for error in errors] == [kind] * len(errors)
    assert len({str(error) for error in errors}) == 1
    for message in messages:
        assert message in str(errors[0])


# --- from configuration alone ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "plugin", "messages"),
    [
        (3, {"tp_degree": 2}, ["tp_degree=2 x pp_degree=1 = 2", "on 3 ranks: tp_degree=3"]),
        (2, {"tp_degree": 2, "pp_degree": 2}, ["2 ranks cannot hold", "= 4"]),
        (2, {"sequence_parallelism": True}, ["sequence_parallelism is on but tp_degree is 1"]),
    ],
    ids=["3/2", "2/4", "sp"],
)
def test_a_world_that_does_not_fit_is_refused_on_all_ranks(
    num_ranks: int, plugin: dict[str, Any], messages: list[str]
) -> None:
    errors = run_ranks(construct, [plugin], num_ranks=num_ranks, errors="return")

    check_alike(errors, ConfigurationError, *messages)


def test_a_rank_with_another_layout_is_named_with_its_field() -> None:
    of_rank = [{"tp_degree": 2}, {"tp_degree": 2}, {"tp_degree": 2}, {"tp_degree": 4}]

    errors = run_ranks(construct, of_rank, num_ranks=4, errors="return")

    check_alike(errors, RanksDisagreeError, "tp_degree is 2 on ranks 0-2 and 4 on rank 3")


def test_a_rank_whose_settings_alone_are_wrong_is_named() -> None:
    errors = run_ranks(
        construct, [{"tp_degree": 2}, {"tp_degree": 3}], num_ranks=2, errors="return"
    )

    check_alike(
        errors,
        ConfigurationError,
        "rank 1: 2 ranks cannot hold tp_degree=3",
        "tp_degree is 2 on rank 0 and 3 on rank 1",
    )
    assert "not set" not in str(errors[0])


def construct_from_environment() -> None:
    import os

    if dist.get_rank() == 1:
        os.environ["MEGATRON_LM_SEQUENCE_PARALLELISM"] = "maybe"
    Accelerator(cpu=True)


def test_a_bad_word_in_one_ranks_environment_is_told_to_all() -> None:
    errors = run_ranks(construct_from_environment, num_ranks=2, errors="return")

    check_alike(errors, ConfigurationError, "rank 1: MEGATRON_LM_SEQUENCE_PARALLELISM is 'maybe'")


# --- from the model -------------------------------------------------------------------------


SMALL = {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("num_ranks", "recipe", "plugin", "messages"),
    [
        (
            4,
            TinyModel("gpt2", changes={"n_head": 2, "n_layer": 2}),
            {"tp_degree": 4},
            ["tp_degree=4", "2 attention heads", "tp_degree can be 1 or 2"],
        ),
        (
            3,
            TinyModel("llama", changes={**SMALL, "num_attention_heads": 6, "hidden_size": 96}),
            {"tp_degree": 3},
            ["tp_degree=3", "2 key/value heads", "128 feed-forward channels"],
        ),
        (
            2,
            TinyModel("gpt2", changes={"n_layer": 3}),
            {"pp_degree": 2},
            ["pp_degree=2 must divide the model's 3 layers"],
        ),
        (1, TWO_LAYERS, {"seq_length": 65}, ["seq_length=65 is longer than the model's 64"]),
    ],
    ids=["heads", "kv-ffn", "layers", "length"],
)
def test_a_model_that_does_not_fit_is_refused_on_all_ranks(
    num_ranks: int, recipe: TinyModel, plugin: dict[str, Any], messages: list[str]
) -> None:
    errors = run_ranks(prepare, [recipe], plugin, num_ranks=num_ranks, errors="return")

    check_alike(errors, ConfigurationError, *messages)


def test_a_rank_with_a_model_of_another_shape_is_named() -> None:
    of_rank = [TWO_LAYERS, TinyModel("gpt2", changes={"n_layer": 2, "n_inner": 128})]

    errors = run_ranks(prepare, of_rank, {}, num_ranks=2, errors="return")

    check_alike(errors, RanksDisagreeError, "ffn_hidden_size is 256 on rank 0 and 128 on rank 1")


def test_a_rank_with_other_weights_is_named() -> None:
    of_rank = [TWO_LAYERS, TinyModel("gpt2", seed=1, changes={"n_layer": 2})]

    errors = run_ranks(prepare, of_rank, {"tp_degree": 2}, num_ranks=2, errors="return")

    check_alike(errors, RanksDisagreeError, "weights of the model")


def prepare_with_rates() -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    model = TWO_LAYERS.build()
    rate = 0.1 if dist.get_rank() == 0 else 0.2
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))


def test_a_rank_with_another_learning_rate_is_named() -> None:
    errors = run_ranks(prepare_with_rates, num_ranks=2, errors="return")

    check_alike(errors, RanksDisagreeError, "0.1", "0.2", "on rank 0", "on rank 1")


def bert() -> torch.nn.Module:
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.model_type = "made-up"
    return BertForMaskedLM(config)


def headless() -> torch.nn.Module:
    return GPT2Model(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=99))


class PeftModelForCausalLM(torch.nn.Module):
    """Looks like PEFT's wrapper: the wrapped model's config, parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = TWO_LAYERS.build()
        self.config = self.base_model.config


def plain_module() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def _loaders_that_differ_in_number() -> None:
    started = start()
    loader = DataLoader(ragged_samples(4), batch_size=2, collate_fn=pad_samples)
    accelerator = started.accelerator
    accelerator.prepare(*[loader] * (1 + accelerator.process_index))


def test_a_rank_that_prepares_another_number_of_loaders_is_named() -> None:
    with pytest.raises(RanksDisagreeError, match=r"objects given to prepare is .* on rank 1"):
        run_ranks(_loaders_that_differ_in_number, num_ranks=2)


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (bert, ["model_type is 'made-up'; supported are ", "gpt2", "llama"]),
        (headless, ["The model is a GPT2Model", "GPT2LMHeadModel"]),
        (PeftModelForCausalLM, ["The model is a PeftModelForCausalLM"]),
        (plain_module, ["without a config of transformers", "gpt2, llama"]),
    ],
    ids=["model-type", "headless", "peft", "plain"],
)
def test_a_model_that_is_not_supported_is_refused_by_name(make: Any, messages: list[str]) -> None:
    errors = run_ranks(prepare, [make], {}, num_ranks=2, errors="return")

    check_alike(errors, UnsupportedError, *messages)


class Trainer:
    """Stands for transformers' Trainer."""


def prepare_trainer() -> None:
    Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin()).prepare(Trainer())


def test_an_object_that_is_no_part_of_a_training_is_refused_by_name() -> None:
    errors = run_ranks(prepare_trainer, num_ranks=2, errors="return")

    check_alike(errors, UnsupportedError, "argument 1 of prepare is a ", "Trainer")


# --- at once --------------------------------------------------------------------------------


def prepare_where_one_rank_fails() -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    model = TWO_LAYERS.build()
    optimizer = SGD.build(model)
    parts = [model, optimizer] if dist.get_rank() == 0 else [model, optimizer, "a scheduler"]
    with pytest.raises(UnsupportedError, match=r"rank 1: argument 3 of prepare is a builtins\.str"):
        accelerator.prepare(*parts)


def test_an_error_of_one_rank_ends_prepare_on_all_at_once() -> None:
    # Well before the 300 seconds that a rank waits for the others.
    run_ranks(prepare_where_one_rank_fails, num_ranks=2, timeout=100)


def go_on_after_a_refusal() -> float:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    model = TWO_LAYERS.build()
    try:
        accelerator.prepare(model, "a scheduler")
    except UnsupportedError:
        prepared, _ = accelerator.prepare(model, SGD.build(model))
        ids = torch.arange(8).reshape(1, 8)
        return prepared(input_ids=ids, labels=ids).loss.item()
    raise AssertionError("nothing was refused")


def test_after_a_refusal_the_right_objects_can_be_prepared() -> None:
    first, second = run_ranks(go_on_after_a_refusal, num_ranks=2)

    assert first == second > 0


def prepare_with_seeds_of_ones_own(build_first: bool) -> list[int]:
    torch.manual_seed(dist.get_rank())
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    seeds = [torch.initial_seed()]
    if build_first:
        model = GPT2LMHeadModel(TWO_LAYERS.config())
    set_seed(5, device_specific=True)
    if not build_first:
        model = GPT2LMHeadModel(TWO_LAYERS.config())
    accelerator.prepare(model)
    return [*seeds, torch.initial_seed()]


def test_ranks_have_one_seed_until_the_script_gives_each_its_own() -> None:
    assert run_ranks(prepare_with_seeds_of_ones_own, True, num_ranks=2) == [[0, 5], [0, 6]]


def test_a_model_initialised_under_seeds_of_each_rank_is_refused() -> None:
    errors = run_ranks(prepare_with_seeds_of_ones_own, False, num_ranks=2, errors="return")

    assert {type(error) for error in errors} == {RanksDisagreeError}
    assert "weights of the model" in str(errors[0])
