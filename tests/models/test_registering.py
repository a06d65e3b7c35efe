from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_megatron import Accelerator, MegatronLMPlugin, add_model_config_to_megatron_parser
from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.models.llama import llama_parameters, llama_shape
from accelerate_megatron.models.registry import FAMILIES, family_of
from tests.helpers.oracle_training import evaluate
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


def own_shape(config: Any) -> Any:
    return llama_shape(config)


@pytest.fixture(autouse=True)
def _families_stay_as_they_are() -> Iterator[None]:
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


def test_a_family_of_ones_own_is_found_by_its_config() -> None:
    returned = add_model_config_to_megatron_parser(
        "own", architectures=["OwnForCausalLM"], parameters=llama_parameters
    )(own_shape)

    family = family_of(OwnConfig())
    assert returned is own_shape
    assert (family.model_type, family.shape) == ("own", own_shape)
    assert family.parameters is llama_parameters
    assert family.architectures == ("OwnForCausalLM",)


def test_like_takes_all_but_the_shape_from_another_family() -> None:
    add_model_config_to_megatron_parser("own", architectures=["OwnForCausalLM"], like="llama")(
        own_shape
    )

    family = family_of(OwnConfig(), architectures=["OwnForCausalLM"])
    assert family.disk_extras == FAMILIES["llama"].disk_extras
    assert family.shape is own_shape


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("llama", {"like": "llama"}, "There is a family for model_type 'llama' already"),
        ("own", {}, "needs either parameters, its table, or like"),
        ("own", {"like": "lama"}, "like is 'lama'; it must be one of .*llama"),
    ],
)
def test_what_cannot_be_registered_is_refused(model_type, settings, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        add_model_config_to_megatron_parser(model_type, architectures=["A"], **settings)


def test_a_parser_of_accelerates_own_is_refused_with_what_to_write() -> None:
    with pytest.raises(UnsupportedError, match=r"parse_own does not take exactly the config"):

        @add_model_config_to_megatron_parser("own", architectures=["A"], like="llama")
        def parse_own(megatron_lm_plugin, model, batch_data):
            pass

    assert "own" not in FAMILIES


def loss_of_own() -> float:
    add_model_config_to_megatron_parser("own", architectures=["OwnForCausalLM"], like="llama")(
        own_shape
    )
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    model = accelerator.prepare(own_model())
    model.eval()
    return float(model(**pad_samples(ragged_samples(2))).loss)


def own_model() -> OwnForCausalLM:
    torch.manual_seed(0)
    return OwnForCausalLM(OwnConfig(**TinyModel("llama").config().to_diff_dict()))


def test_a_model_of_ones_own_runs() -> None:
    losses = run_ranks(loss_of_own, num_ranks=2)

    assert losses == pytest.approx(
        [evaluate(own_model(), pad_samples(ragged_samples(2)))] * 2, abs=1e-5
    )
