"""The rules that tie the sizes of the axes to the world and the model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.nearest import divisors
from accelerate_megatron.errors import ConfigurationError
from tests.config.shapes import shape


@pytest.mark.parametrize(
    ("sizes", "dp_size"),
    [
        ({"world_size": 1}, 1),
        ({"world_size": 8, "tp_size": 2}, 4),
        ({"world_size": 8, "tp_size": 2, "pp_size": 2}, 2),
        ({"world_size": 8, "tp_size": 4, "pp_size": 2}, 1),
    ],
)
def test_the_data_parallel_size_is_what_the_other_axes_leave(
    sizes: dict[str, int], dp_size: int
) -> None:
    layout = Layout(**sizes)

    assert layout.dp_size == dp_size
    assert layout.world_problems() == []


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ({"world_size": 4, "tp_size": 0}, ["tp_degree is 0; it must be at least 1."]),
        ({"world_size": 4, "pp_size": -1}, ["pp_degree is -1; it must be at least 1."]),
        (
            {"world_size": 6, "tp_size": 4},
            [
                "6 ranks cannot hold tp_degree=4 x pp_degree=1 = 4",
                "must be a multiple of 4, such as 4 or 8.",
                "Nearest that works on 6 ranks: tp_degree=3, pp_degree=1; or tp_degree=6, ",
            ],
        ),
        (
            {"world_size": 4, "tp_size": 2, "pp_size": 4},
            [
                "4 ranks cannot hold tp_degree=2 x pp_degree=4 = 8",
                "such as 8. Nearest that works on 4 ranks: tp_degree=1, pp_degree=4; or "
                "tp_degree=2, pp_degree=2; or tp_degree=1, pp_degree=2.",
            ],
        ),
        (
            {"world_size": 2, "sequence_parallel": True},
            ["sequence_parallelism is on but tp_degree is 1", "Set tp_degree to 2 or more"],
        ),
        (
            {"world_size": 2, "layers_per_virtual_stage": 1},
            ["num_layers_per_virtual_pipeline_stage is 1 but pp_degree is 1"],
        ),
        (
            {"world_size": 6, "etp_size": 4},
            [
                "6 ranks cannot hold expert_model_parallel_size=1 x expert_tensor_parallel_size=4 "
                "x pp_degree=1 = 4",
                "1 x 2, 1 x 3, 1 x 6",
            ],
        ),
        (
            {"world_size": 4, "pp_size": 2, "ep_size": 2, "etp_size": 2},
            ["4 ranks cannot hold expert_model_parallel_size=2 x expert_tensor_parallel_size=2"],
        ),
    ],
    ids=["tp0", "pp-1", "6/4", "4/8", "sp", "virtual", "etp", "ep-etp-pp"],
)
def test_sizes_that_cannot_be_are_refused_with_what_can(
    sizes: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Layout(**sizes).check()

    for message in messages:
        assert message in str(caught.value)


def test_all_problems_of_the_sizes_are_listed_at_once() -> None:
    layout = Layout(world_size=3, pp_size=2, sequence_parallel=True)

    with pytest.raises(ConfigurationError, match=r"2 settings do not fit:\n  - 3 ranks.*\n  - seq"):
        layout.check()


@pytest.mark.parametrize(
    ("sizes", "changes", "messages"),
    [
        (
            {"tp_size": 4},
            {"num_attention_heads": 6, "num_query_groups": 6},
            ["tp_degree=4", "6 attention heads, 6 key/value heads", "tp_degree can be 1 or 2"],
        ),
        ({"tp_size": 4}, {"num_query_groups": 3}, ["3 key/value heads"]),
        ({"tp_size": 4}, {"hidden_size": 62}, ["62 hidden channels"]),
        (
            {"tp_size": 4},
            {"ffn_hidden_size": 130},
            ["130 feed-forward channels", "On 4 ranks, tp_degree can be 1 or 2"],
        ),
        (
            {"pp_size": 4},
            {"num_layers": 6},
            ["pp_degree=4 must divide the model's 6 layers", "pp_degree can be 1 or 2"],
        ),
        (
            {"pp_size": 2, "layers_per_virtual_stage": 2},
            {},
            ["num_layers_per_virtual_pipeline_stage=2", "into two chunks or more", "can be 1"],
        ),
        (
            {"pp_size": 2, "layers_per_virtual_stage": 3},
            {"num_layers": 8},
            ["=3 must divide the 4 layers of a stage (8 layers / pp_degree=2)", "1 or 2"],
        ),
    ],
    ids=["heads", "kv", "hidden", "ffn", "layers", "one-chunk", "chunks"],
)
def test_a_model_that_does_not_fit_is_refused_with_what_does(
    sizes: dict[str, Any], changes: dict[str, Any], messages: list[str]
) -> None:
    layout = Layout(world_size=4, **sizes)

    problems = layout.model_problems(shape(**changes), num_micro_batches=4)

    assert len(problems) == 1
    for message in messages:
        assert message in problems[0]


def test_virtual_stages_want_rounds_of_micro_batches() -> None:
    layout = Layout(world_size=2, pp_size=2, layers_per_virtual_stage=1)

    (problem,) = layout.model_problems(shape(), num_micro_batches=3)

    assert "num_micro_batches=3 must be a multiple of pp_degree=2" in problem
    assert "Set num_micro_batches to 4" in problem
    assert layout.model_problems(shape(), num_micro_batches=4) == []


def test_all_problems_of_the_model_are_found_at_once() -> None:
    layout = Layout(world_size=8, tp_size=2, pp_size=4)

    problems = layout.model_problems(shape(num_layers=6, ffn_hidden_size=127), 1)

    assert len(problems) == 2


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "padded"),
    [
        (99, 1, 128),
        (128, 1, 128),
        (129, 1, 256),
        (99, 4, 512),
        (50257, 2, 50432),
        (50257, 8, 51200),
    ],
)
def test_the_vocabulary_is_padded_to_a_multiple_for_every_rank(
    vocab_size: int, tp_size: int, padded: int
) -> None:
    assert Layout(world_size=8, tp_size=tp_size).padded_vocab_size(vocab_size) == padded


def test_the_chunks_of_a_stage_follow_from_the_layers() -> None:
    assert Layout(world_size=4, pp_size=2).chunks_per_stage(8) is None
    layout = Layout(world_size=4, pp_size=2, layers_per_virtual_stage=2)
    assert layout.chunks_per_stage(8) == 2


def test_a_sequence_is_split_only_under_sequence_parallelism() -> None:
    assert Layout(world_size=4, tp_size=4).sequence_multiple == 1
    assert Layout(world_size=4, tp_size=4, sequence_parallel=True).sequence_multiple == 4


def test_divisors_ascend() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_one_problem_is_told_without_a_list() -> None:
    with pytest.raises(ConfigurationError, match=re.compile(r"^tp_degree is 0; it must")):
        Layout(world_size=1, tp_size=0).check()
