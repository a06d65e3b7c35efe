"""`MegatronLMPlugin`: where values come from, and which are refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import pytest
from accelerate.utils import MegatronLMPlugin as UpstreamPlugin

from accelerate_megatron import MegatronLMPlugin
from accelerate_megatron.config.plugin_fields import FIELDS
from accelerate_megatron.errors import ConfigurationError, UnknownFieldError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in FIELDS:
        monkeypatch.delenv(field.variable, raising=False)


# --- where a value comes from ---------------------------------------------------------------


def test_every_field_has_its_default_when_nothing_is_said() -> None:
    plugin = MegatronLMPlugin()

    assert {f.name: getattr(plugin, f.name) for f in FIELDS} == {f.name: f.default for f in FIELDS}


def test_the_signature_is_accelerates() -> None:
    assert inspect.signature(MegatronLMPlugin) == inspect.signature(UpstreamPlugin)


def test_values_can_be_given_by_position() -> None:
    plugin = MegatronLMPlugin(4, 2)

    assert (plugin.tp_degree, plugin.pp_degree) == (4, 2)


def test_a_value_left_out_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "Yes")
    monkeypatch.setenv("MEGATRON_LM_GRADIENT_CLIPPING", "0.5")
    monkeypatch.setenv("MEGATRON_LM_LR_DECAY_STYLE", "cosine")
    monkeypatch.setenv("MEGATRON_LM_TRAIN_ITERS", "None")

    plugin = MegatronLMPlugin(pp_degree=2)

    assert (plugin.tp_degree, plugin.pp_degree) == (2, 2)
    assert plugin.sequence_parallelism is True
    assert (plugin.gradient_clipping, plugin.lr_decay_style) == (0.5, "cosine")
    assert plugin.train_iters is None


def test_a_value_given_wins_over_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    monkeypatch.setenv("MEGATRON_LM_LR_DECAY_STYLE", "cosine")
    monkeypatch.setenv("MEGATRON_LM_MIN_LR", "0.1")

    # The last two are what the signature has as defaults.
    plugin = MegatronLMPlugin(tp_degree=2, lr_decay_style="linear", min_lr=0)

    assert (plugin.tp_degree, plugin.lr_decay_style, plugin.min_lr) == (2, "linear", 0.0)


def test_none_stands_for_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")

    assert MegatronLMPlugin(tp_degree=None, num_micro_batches=None).tp_degree == 4
    assert MegatronLMPlugin(num_micro_batches=None).num_micro_batches == 1


def test_a_plugin_can_be_copied() -> None:
    plugin = copy.deepcopy(MegatronLMPlugin(tp_degree=2))

    assert plugin.tp_degree == 2


# --- kinds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, "true", "YES", "1", "on"])
def test_words_for_true_are_read(value: Any) -> None:
    assert MegatronLMPlugin(use_distributed_optimizer=value).use_distributed_optimizer is True


@pytest.mark.parametrize("value", [False, "False", "no", "0", "off"])
def test_words_for_false_are_read(value: Any) -> None:
    # A plain bool("False") would be True.
    assert MegatronLMPlugin(calculate_per_token_loss=value).calculate_per_token_loss is False


def test_the_field_that_accelerate_types_as_text_reads_words_too() -> None:
    assert MegatronLMPlugin(is_train_batch_min="no").is_train_batch_min is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sequence_parallelism": "maybe"}, r"MegatronLMPlugin.sequence_parallelism is 'maybe'"),
        ({"tp_degree": 1.5}, r"tp_degree is 1.5; it must be a whole number"),
        ({"tp_degree": "2"}, r"tp_degree is '2'; it must be a whole number"),
        ({"num_micro_batches": True}, r"num_micro_batches is True; it must be a whole number"),
        ({"gradient_clipping": "1"}, r"gradient_clipping is '1'; it must be a number"),
        ({"lr_decay_style": "sine"}, r"lr_decay_style is 'sine'; it must be one of constant"),
    ],
)
def test_values_of_another_kind_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin(**values)


@pytest.mark.parametrize("word", ["maybe", "2", "y es"])
def test_a_bad_word_in_the_environment_names_the_variable(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", word)

    with pytest.raises(ConfigurationError, match="MEGATRON_LM_SEQUENCE_PARALLELISM is '"):
        MegatronLMPlugin()


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipeline_model_parallel_size", "'pipeline_model_parallel_size': it is pp_degree"),
        ("tensor_model_parallel_size", "it is tp_degree"),
        ("mixed_precision", "it is mixed_precision of Accelerator"),
        ("precision", "it is mixed_precision of Accelerator"),
        ("require_logits", "it is return_logits"),
        ("tp_degre", "did you mean tp_degree"),
        ("num_microbatches", "did you mean num_micro_batches"),
        ("quux", "docs/plugin.md lists the fields"),
    ],
)
def test_an_unknown_field_points_to_the_right_one(name: str, message: str) -> None:
    with pytest.raises(UnknownFieldError, match=message):
        MegatronLMPlugin(**{name: 2})


def test_an_unknown_field_is_a_type_error_as_pythons_own() -> None:
    with pytest.raises(TypeError):
        MegatronLMPlugin(quux=1)


def test_all_unknown_fields_are_named() -> None:
    with pytest.raises(UnknownFieldError, match=r"'clip_grad': .*gradient_clipping.*'pp_size'"):
        MegatronLMPlugin(clip_grad=1.0, pp_size=2)


def test_fields_changed_later_are_checked_again() -> None:
    plugin = MegatronLMPlugin()
    plugin.num_micro_batches = 0

    with pytest.raises(ConfigurationError, match="num_micro_batches is 0; it must be at least 1"):
        plugin.check()


# --- contradictions -------------------------------------------------------------------------


def test_contradictions_are_listed_together_with_all_numbers() -> None:
    with pytest.raises(ConfigurationError) as caught:
        MegatronLMPlugin(
            train_iters=10,
            train_samples=80,
            lr_warmup_iters=2,
            lr_warmup_fraction=0.5,
            gradient_clipping=-1,
            hidden_dropout=1.5,
        )

    message = str(caught.value)
    assert message.startswith("4 settings do not fit:")
    assert "train_iters=10 and train_samples=80; at most one" in message
    assert "lr_warmup_iters=2 and lr_warmup_fraction=0.5" in message
    assert "gradient_clipping is -1.0; it must be at least 0" in message
    assert "hidden_dropout is 1.5; it must be in [0, 1]" in message


@pytest.mark.parametrize(
    "values",
    [
        {"num_micro_batches": 0},
        {"min_lr": -0.1},
        {"train_iters": 0},
        {"eval_interval": 0},
        {"lr_warmup_iters": -1},
        {"lr_decay_iters": 0},
        {"seq_length": 0},
        {"attention_dropout": -0.1},
        {"lr_warmup_fraction": 2.0},
    ],
    ids=lambda values: next(iter(values)),
)
def test_numbers_out_of_range_are_refused(values: dict[str, Any]) -> None:
    (name,) = values

    with pytest.raises(ConfigurationError, match=f"MegatronLMPlugin.{name} is .*; it must be"):
        MegatronLMPlugin(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"recompute_granularity": "full", "recompute_activations": True},
            "recompute_activations is on, .* give one of the two",
        ),
        ({"recompute_method": "block"}, "recompute_method='block' without recompute_granularity="),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 2},
            "recompute_num_layers=2 without recompute_granularity='full'",
        ),
    ],
    ids=["both", "method-alone", "layers-of-selective"],
)
def test_settings_of_recomputation_that_exclude_each_other_are_refused_at_once(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin(**values)


@pytest.mark.parametrize("name", ["micro_batch_size", "global_batch_size", "data_parallel_size"])
def test_a_size_read_before_prepare_says_when_it_is_known(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name} is known after accelerator.prepare"):
        getattr(MegatronLMPlugin(), name)


def test_a_name_that_the_plugin_does_not_have_is_an_attribute_error_as_pythons_own() -> None:
    with pytest.raises(AttributeError, match="'MegatronLMPlugin' object has no attribute 'tp'"):
        MegatronLMPlugin().tp  # noqa: B018


@dataclasses.dataclass
class OwnPlugin(MegatronLMPlugin):
    """As packages for other devices do: a dataclass with a field more."""

    graph_mode: bool = False


def test_a_subclass_that_is_a_dataclass_has_the_same_fields_and_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "3")

    plugin = OwnPlugin(tp_degree=2, graph_mode=True)

    assert (plugin.tp_degree, plugin.pp_degree, plugin.graph_mode) == (2, 3, True)
    with pytest.raises(ConfigurationError, match="num_micro_batches is 0"):
        OwnPlugin(num_micro_batches=0)
