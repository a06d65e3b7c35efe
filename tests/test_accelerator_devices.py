"""Ranks that compute on different devices are found before they make a process group."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from accelerate_megatron import Accelerator, accelerator
from accelerate_megatron.errors import ConfigurationError, RanksDisagreeError
from tests.helpers.ports import held_port
from tests.helpers.ranks import run_ranks


def run_before_a_group_is_made(function: Any, num_ranks: int) -> list[Any]:
    with held_port() as port:
        return run_ranks(
            function,
            num_ranks=num_ranks,
            process_group=False,
            env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            errors="return",
        )


def construct_where_rank_1_finds_no_gpu() -> None:
    has_gpu = os.environ["RANK"] != "1"
    accelerator.wants_cpu = lambda cpu: cpu or not has_gpu
    try:
        Accelerator()
    finally:
        assert not dist.is_initialized()  # it would have been of two backends


def test_a_rank_that_falls_back_to_the_cpu_is_named() -> None:
    errors = run_before_a_group_is_made(construct_where_rank_1_finds_no_gpu, 3)

    assert [type(error) for error in errors] == [RanksDisagreeError] * 3
    assert len({str(error) for error in errors}) == 1
    assert 'is "cuda" on ranks 0, 2 and "cpu" on rank 1' in str(errors[0])
    assert "device (cpu where CUDA finds no GPU)" in str(errors[0])


def construct_with_a_bad_word_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.environ["ACCELERATE_USE_CPU"] = "perhaps"
    Accelerator(cpu=False)


def test_a_bad_word_for_the_device_on_one_rank_is_told_to_all() -> None:
    errors = run_before_a_group_is_made(construct_with_a_bad_word_on_rank_1, 2)

    assert [type(error) for error in errors] == [ConfigurationError] * 2
    assert len({str(error) for error in errors}) == 1
    assert "rank 1: ACCELERATE_USE_CPU is 'perhaps'" in str(errors[0])


def construct_on_the_cpu() -> tuple[str, int]:
    made = Accelerator(cpu=True)
    made.wait_for_everyone()
    return dist.get_backend(), made.num_processes


def test_ranks_with_one_device_make_their_group() -> None:
    assert run_before_a_group_is_made(construct_on_the_cpu, 2) == [("gloo", 2)] * 2
