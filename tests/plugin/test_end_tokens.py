"""A config whose `eos_token_id` is a list, as those of newer models are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import start

FIRST_END, OTHER_END = 7, 9
RECIPE = TinyModel("gpt2", changes={"n_layer": 2, "eos_token_id": [FIRST_END, OTHER_END]})


def samples() -> list[dict[str, torch.Tensor]]:
    rows = ragged_samples(4, min_length=12)
    for row in rows:
        row["input_ids"][[-5, -3]] = torch.tensor([FIRST_END, OTHER_END])
        row["labels"] = row["input_ids"].clone()
    return rows


def loss_of_a_list_of_ends(plugin: dict[str, Any]) -> tuple[float, int]:
    started = start(RECIPE, samples=samples(), batch_size=4, **plugin)
    args = started.accelerator.state.megatron_lm_plugin.megatron_lm_default_args
    started.model.eval()
    return started.model(**pad_samples(samples())).loss.item(), args["eos_token_id"]


def hf_loss_without_what_follows(token: int | None) -> float:
    batch = pad_samples(samples())
    labels = batch["labels"].clone()
    if token is not None:  # what is predicted at an end of document belongs to another one
        labels[:, 1:][batch["input_ids"][:, :-1] == token] = -100
    with torch.no_grad():
        return float(RECIPE.build().eval()(**(batch | {"labels": labels})).loss)


@pytest.mark.parametrize(("masks", "token"), [(False, None), (True, FIRST_END)])
def test_the_first_of_several_end_tokens_ends_documents(masks: bool, token: int | None) -> None:
    plugin = {"eod_mask_loss": masks}

    [(loss, eos_token_id)] = run_ranks(loss_of_a_list_of_ends, plugin, num_ranks=1)

    assert eos_token_id == FIRST_END
    assert loss == pytest.approx(hf_loss_without_what_follows(token), abs=1e-5)
    assert loss != pytest.approx(hf_loss_without_what_follows(OTHER_END), abs=1e-4)
