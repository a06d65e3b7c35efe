"""A loss that is not finite on one rank: all ranks stop, or all leave the update out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator, FaultPolicy, MegatronLMDummyScheduler, MegatronLMPlugin
from accelerate_megatron.errors import ConfigurationError, NonFiniteError
from accelerate_megatron.training.gpt import token_loss
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, ragged_samples

BAD_UPDATE = 2


@dataclass
class _Spoilt:
    """The loss of GPT, spoilt on one rank in one update: the loss itself, or its gradient only."""

    kind: str
    rank: int
    calls: int = 0

    def __call__(self, loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        self.calls += 1
        total, count, report = token_loss(loss_mask, output)
        me = torch.distributed.get_rank()
        # Two micro-batches an update.
        if me == self.rank and self.calls == 2 * BAD_UPDATE + 1:
            if self.kind == "loss":
                return total * torch.nan, count, {"lm loss": report["lm loss"] * torch.nan}
            total.register_hook(lambda grad: grad * torch.inf)
        return total, count, report


def _train(policy: str, kind: str, layout: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.manual_seed(3)
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=MegatronLMPlugin(
            num_micro_batches=2, train_iters=10, custom_loss_function=_Spoilt(kind, rank), **layout
        ),
        faults=FaultPolicy(non_finite=policy),  # type: ignore[arg-type]
    )
    hf_model = TinyModel("gpt2").build()
    optimizer = TinyOptimizer("adamw", {"lr": 1e-3}).build(hf_model)
    loader = DataLoader(ragged_samples(32), batch_size=2, collate_fn=pad_samples)
    model, optimizer, loader, _ = accelerator.prepare(
        hf_model, optimizer, loader, MegatronLMDummyScheduler(optimizer)
    )
    model.train()
    seen: dict[str, Any] = {"skipped": [], "changed": [], "losses": [], "norms": []}
    for batch in loader:
        before = [p.detach().clone() for p in model.parameters()]
        rate = optimizer.param_groups[0]["lr"]
        try:
            seen["losses"].append(model(**batch).loss.item())
        except NonFiniteError as error:
            seen["error"] = str(error)
            seen["spoilt"] = any(
                not torch.equal(old, new)
                for old, new in zip(before, model.parameters(), strict=True)
            )
            break
        optimizer.step()
        seen["skipped"].append(accelerator.optimizer_step_was_skipped)
        seen["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        changed = any(
            not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
        )
        seen["changed"].append(changed)
        if seen["skipped"][-1]:
            seen["rate kept"] = optimizer.param_groups[0]["lr"] == rate
    seen["updates"] = model.session.num_updates
    return seen


LAYOUTS = [
    pytest.param({}, 2, 1, id="dp2"),
    pytest.param({"pp_degree": 2, "use_distributed_optimizer": True}, 2, 1, id="pp2"),
]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize(("layout", "num_ranks", "rank"), LAYOUTS)
def test_skip_leaves_the_update_out_on_every_rank(
    layout: dict[str, Any], num_ranks: int, rank: int, kind: str
) -> None:
    ranks = run_ranks(_train, "skip", kind, layout, rank, num_ranks=num_ranks)

    for seen in ranks:
        assert [i for i, skipped in enumerate(seen["skipped"]) if skipped] == [BAD_UPDATE]
        assert not seen["changed"][BAD_UPDATE]
        assert seen["changed"][-1]
        assert seen["rate kept"]
        assert [i for i, norm in enumerate(seen["norms"]) if not norm > 0] == [BAD_UPDATE]
        assert math.isnan(seen["norms"][BAD_UPDATE])
        assert seen["updates"] == len(seen["losses"]) - 1
        assert all(torch.isfinite(torch.tensor(seen["losses"][BAD_UPDATE + 1 :])))


STOPPED = [
    pytest.param({}, 2, 1, "loss", marks=pytest.mark.slow, id="dp2-loss"),
    pytest.param({}, 2, 1, "gradient", id="dp2-gradient"),
    pytest.param(
        # Rank 3 would hold padding of the vocabulary alone, and no gradient of the loss.
        {"tp_degree": 2, "use_distributed_optimizer": True},
        *(4, 2, "gradient"),
        id="tp2-dp2-dist-opt",
    ),
]


@pytest.mark.parametrize(("layout", "num_ranks", "rank", "kind"), STOPPED)
def test_stop_raises_on_every_rank_and_keeps_the_weights(
    layout: dict[str, Any], num_ranks: int, rank: int, kind: str
) -> None:
    ranks = run_ranks(_train, "stop", kind, layout, rank, num_ranks=num_ranks)

    what = "loss" if kind == "loss" else "gradient norm"
    for seen in ranks:
        assert re.match(rf"In update {BAD_UPDATE + 1} the {what} is (nan|inf)\.", seen["error"])
        assert seen["changed"] == [True] * BAD_UPDATE
        assert not seen["spoilt"]
        assert seen["updates"] == BAD_UPDATE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"non_finite": "ignore"}, "non_finite is 'ignore'; it must be one of stop, skip"),
        ({"hang_seconds": 0}, "hang_seconds is 0; it must be more than 0"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FaultPolicy(**settings)


def test_something_else_than_a_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="faults is a str"):
        Accelerator(cpu=True, faults="skip")  # type: ignore[arg-type]
