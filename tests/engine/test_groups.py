"""The process groups of a run."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate.utils import InitProcessGroupKwargs

from accelerate_megatron import Accelerator, MegatronLMPlugin
from tests.helpers.ranks import run_ranks
from tests.training.start import TWO_LAYERS


def timeouts_of_groups(timeout: timedelta) -> set[timedelta]:
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        megatron_lm_plugin=MegatronLMPlugin(),
    )
    ranks = accelerator.prepare(TWO_LAYERS.build()).session.ranks
    groups = (ranks.tp_group, ranks.pp_group, ranks.cp_group, ranks.dp_group, ranks.replica_group)
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_ranks_wait_in_every_group_as_long_as_the_script_says() -> None:
    asked = timedelta(minutes=7)

    assert run_ranks(timeouts_of_groups, asked, num_ranks=1) == [{asked}]
