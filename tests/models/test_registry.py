from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, LlamaConfig

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.registry import FAMILIES, family_of


@pytest.mark.parametrize(("config_class", "name"), [(GPT2Config, "gpt2"), (LlamaConfig, "llama")])
def test_a_config_finds_its_family_by_model_type(config_class, name):
    assert family_of(config_class()) is FAMILIES[name]
    assert FAMILIES[name].model_type == name


@pytest.mark.parametrize("model_type", ["llama2", "LLAMA", "gpt", None])
def test_a_model_type_that_is_not_exactly_known_is_refused_with_the_supported_ones(model_type):
    with pytest.raises(
        UnsupportedError,
        match=rf"SimpleNamespace\.model_type is {model_type!r}; supported are .*llama, ",
    ):
        family_of(SimpleNamespace(model_type=model_type))


def test_a_near_miss_is_suggested():
    with pytest.raises(UnsupportedError, match=r"Did you mean 'llama'\?"):
        family_of(SimpleNamespace(model_type="llama4"))


def test_another_architecture_of_a_known_type_is_refused_with_the_supported_one():
    config = GPT2Config(architectures=["GPT2ForSequenceClassification"])

    with pytest.raises(
        UnsupportedError,
        match=r"is a GPT2ForSequenceClassification; for model_type 'gpt2' the supported "
        r"architecture is GPT2LMHeadModel",
    ):
        family_of(config)


def test_the_architecture_of_the_config_is_accepted():
    assert family_of(GPT2Config(architectures=["GPT2LMHeadModel"])) is FAMILIES["gpt2"]


def test_the_class_of_a_live_model_counts_more_than_what_it_was_saved_as():
    config = LlamaConfig(architectures=["LlamaModel"])

    assert family_of(config, architectures=["MyLlama", "LlamaForCausalLM"]) is FAMILIES["llama"]
    with pytest.raises(UnsupportedError, match="is a LlamaForSequenceClassification"):
        family_of(LlamaConfig(), architectures=["LlamaForSequenceClassification"])


def test_families_need_neither_torch_nor_transformers():
    code = (
        "import sys, accelerate_megatron.models.registry; "
        "import accelerate_megatron.models.megatron_shapes; "
        "print(sorted({'torch', 'transformers', 'megatron'} & set(sys.modules)))"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout == "[]\n"
