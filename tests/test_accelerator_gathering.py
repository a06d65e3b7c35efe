"""`Accelerator.gather` and its kin: each replica counts once, each sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from accelerate_megatron.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.test_accelerator import make
from tests.training.start import start


def gather_over_two_by_two() -> dict[str, Any]:
    started = start(tp_degree=2, batch_size=2)
    accelerator, dp_rank = started.accelerator, started.model.session.ranks.dp_rank
    mine = torch.full((dp_rank + 1, 2), float(dp_rank))
    told = {
        "rows": accelerator.gather(mine).tolist(),
        "scalar": accelerator.gather(torch.tensor(dp_rank)).tolist(),
        "bool": accelerator.gather(torch.tensor([dp_rank == 1])).tolist(),
        "nested": accelerator.gather({"a": [torch.tensor([dp_rank])], "b": None}),
        "sum": accelerator.reduce(torch.tensor([dp_rank + 1.0])).item(),
        "mean": accelerator.reduce(torch.tensor([dp_rank + 1]), "mean").item(),
        "scaled": accelerator.reduce({"x": torch.ones(1)}, "sum", scale=0.5)["x"].item(),
        "none": accelerator.reduce(torch.tensor([dp_rank]), "none").item() - dp_rank,
    }
    with pytest.raises(ConfigurationError) as refused:
        accelerator.reduce(torch.ones(1), "max")
    told["bad"] = str(refused.value)
    with pytest.raises(UnsupportedError) as refused:
        accelerator.gather_for_metrics(["text"])
    told["text"] = str(refused.value)
    return told


@pytest.fixture(scope="module")
def gathered() -> list[dict[str, Any]]:
    return run_ranks(gather_over_two_by_two, num_ranks=4)


def test_gather_takes_each_replica_once(gathered: Any) -> None:
    for told in gathered:
        assert told["rows"] == [[0, 0], [1, 1], [1, 1]]
        assert told["scalar"] == [0, 1]
        assert told["bool"] == [False, True]
        assert told["nested"]["a"][0].tolist() == [0, 1]
        assert told["nested"]["b"] is None
        assert "gather got a str, and collects tensors" in told["text"]


def test_reduce_counts_each_replica_once(gathered: Any) -> None:
    for told in gathered:
        assert (told["sum"], told["mean"], told["scaled"], told["none"]) == (3.0, 1.5, 1.0, 0)
        assert "reduction is 'max'; it must be sum, mean or none" in told["bad"]


def pad_logits() -> Any:
    """Pad what the last stages have, two columns or three, and None on the first stages."""
    accelerator = start(pp_degree=2).accelerator
    ranks = accelerator._running.ranks
    logits = torch.ones(1, 2 + ranks.dp_rank) if ranks.is_last_stage else None
    behind = accelerator.pad_across_processes(logits, dim=1, pad_index=-1)
    before = accelerator.pad_across_processes({"a": logits}, dim=-1, pad_first=True)["a"]
    other = accelerator.pad_across_processes(logits, dim=2)
    return [None if x is None else x.tolist() for x in (accelerator.gather(behind), before, other)]


def test_tensors_are_padded_over_the_replicas_that_have_any() -> None:
    first, second, third, fourth = run_ranks(pad_logits, num_ranks=4, timeout=60)

    assert first == second == [None, None, None]
    assert third == [[[1, 1, -1], [1, 1, 1]], [[0, 1, 1]], [[1, 1]]]
    assert fourth == [[[1, 1, -1], [1, 1, 1]], [[1, 1, 1]], [[1, 1, 1]]]


def evaluate(plugin: dict[str, Any]) -> Any:
    """Gather the first token of every sample of a loader, inside another loader's loop."""
    started = start(samples=ragged_samples(20), batch_size=2, **plugin)
    accelerator = started.accelerator
    samples = [{**sample} for sample in ragged_samples(7, seed=3)]
    for index, sample in enumerate(samples):
        sample["input_ids"][0] = index
    loader = accelerator.prepare(DataLoader(samples, batch_size=2, collate_fn=pad_samples))
    state = GradientState()
    seen: list[int] = []
    for _ in started.loader:
        assert state.active_dataloader is started.loader
        for batch in loader:
            first, _ = accelerator.gather_for_metrics(
                (batch["input_ids"][:, 0], batch["labels"][:, :2])
            )
            seen += first.tolist()
            is_end = accelerator.gradient_state.end_of_dataloader
        assert is_end
        assert state.active_dataloader is started.loader
        break
    del batch
    whole = accelerator.gather(torch.zeros(2)).shape[0]
    return sorted(seen), whole


@pytest.mark.parametrize(
    ("num_ranks", "plugin"),
    [(2, {}), (2, {"tp_degree": 2, "num_micro_batches": 2}), (2, {"num_micro_batches": 3})],
    ids=["dp2", "tp2-micro2", "dp2-micro3"],
)
def test_gathered_metrics_have_every_sample_once(num_ranks: int, plugin: dict[str, Any]) -> None:
    for seen, _ in run_ranks(evaluate, plugin, num_ranks=num_ranks):
        assert seen == list(range(7))


def gather_too_early() -> None:
    make().gather(torch.ones(1))


def test_gathering_before_prepare_says_what_is_missing() -> None:
    with pytest.raises(
        TrainingLoopError, match=r"no prepared model yet; call accelerator\.prepare"
    ):
        run_ranks(gather_too_early, num_ranks=1)


def trigger() -> list[bool]:
    accelerator = make()
    told = [accelerator.check_trigger()]
    if accelerator.process_index == 0:
        accelerator.set_trigger()
    return [*told, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_of_one_rank_is_seen_by_all_once() -> None:
    assert run_ranks(trigger, num_ranks=2) == [[False, True, False]] * 2
