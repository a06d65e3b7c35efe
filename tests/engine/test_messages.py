"""Messages between the stages of a pipeline, when one stage is behind."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples
from tests.training.start import start

BATCH = pad_samples(ragged_samples(8))


def evaluations_with_a_late_receiver(arguments: dict[str, Any]) -> list[float]:
    """Evaluate twice while the second stage asks for its inputs long after they were sent."""
    started = start(
        TinyModel("gpt2"),
        pp_degree=2,
        num_layers_per_virtual_pipeline_stage=1,
        num_micro_batches=4,
        other_megatron_args=arguments,
    )
    messages = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    communicate = messages.P2PCommunicator._communicate

    def late(*given: Any, **named: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return communicate(*given, **named)

    messages.P2PCommunicator._communicate = late
    started.model.eval()
    try:
        return [started.model(**BATCH).loss.item() for _ in range(2)]
    finally:
        messages.P2PCommunicator._communicate = communicate


@pytest.mark.parametrize("arguments", [{}, {"overlap_p2p_comm_warmup_flush": True}], ids=str)
def test_the_last_message_of_a_schedule_reaches_a_late_receiver(arguments: dict[str, Any]) -> None:
    *_, values = run_ranks(evaluations_with_a_late_receiver, arguments, num_ranks=2)

    model = TinyModel("gpt2").build().eval()
    with torch.no_grad():
        logits = model(BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
    plain = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), BATCH["labels"][:, 1:].flatten()
    ).item()
    assert values == pytest.approx([plain, plain], abs=1e-5)
