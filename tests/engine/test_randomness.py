"""The model's random numbers: apart from the user's, in the right places equal or different."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.ranks import run_ranks
from tests.training.start import start


def draws(plugin: dict[str, Any]) -> dict[str, Any]:
    """Return what the default generator and Megatron's tracker give inside the model's block."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.manual_seed(5)
    randomness = start(**plugin).model.session.randomness
    users = torch.get_rng_state()
    with randomness.active():
        replicated = torch.rand(3).tolist()
        with get_cuda_rng_tracker().fork():
            own = torch.rand(3).tolist()
    with randomness.active():
        later = torch.rand(3).tolist()
        torch.rand(100)
    return {
        "replicated": replicated,
        "own": own,
        "later": later,
        "untouched": torch.equal(users, torch.get_rng_state()),
    }


def test_tensor_parallel_ranks_share_one_stream_and_have_one_of_their_own() -> None:
    first, second = run_ranks(draws, {"tp_degree": 2}, num_ranks=2)

    assert first["replicated"] == second["replicated"]
    assert first["own"] != second["own"]


def test_replicas_share_no_stream() -> None:
    first, second = run_ranks(draws, {}, num_ranks=2)

    assert first["replicated"] != second["replicated"]
    assert first["own"] != second["own"]


def test_pipeline_stages_share_no_stream() -> None:
    first, second = run_ranks(draws, {"pp_degree": 2}, num_ranks=2)

    assert first["replicated"] != second["replicated"]
    assert first["own"] != second["own"]


def test_the_stream_goes_on_and_the_users_stays() -> None:
    (told,) = run_ranks(draws, {}, num_ranks=1)

    assert told["later"] != told["replicated"]
    assert told["untouched"]


def fail_inside() -> bool:
    randomness = start().model.session.randomness
    users = torch.get_rng_state()
    try:
        with randomness.active():
            torch.rand(1)
            raise KeyError
    except KeyError:
        return torch.equal(users, torch.get_rng_state())


def test_the_users_stream_is_back_after_an_error() -> None:
    assert run_ranks(fail_inside, num_ranks=1) == [True]
