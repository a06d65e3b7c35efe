"""What each rank of `accelerate-megatron doctor` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate_megatron import Accelerator
from accelerate_megatron.cli.doctor import are_close, report_file
from accelerate_megatron.cli.jobs import settings_of_rank, write_report

_SECONDS = 30.0
"""How long a rank waits for the other in a collective."""

_CONFIG = GPT2Config(
    vocab_size=128,
    n_positions=32,
    n_embd=64,
    n_layer=2,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def main() -> None:
    """Check one thing after another, and write each down at once: the next may not return."""
    settings = settings_of_rank()
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=_SECONDS))]
    )
    file = report_file(settings["folder"], settings["tp_degree"], accelerator.process_index)
    report: dict[str, Any] = {
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
    }

    def note(name: str, check: Callable[[], dict[str, Any]]) -> None:
        report[name] = _outcome(check)
        file.write_text(json.dumps(report), encoding="utf-8")

    if accelerator.num_processes > 1:
        note("collectives", lambda: check_collectives(accelerator.device))
    training = Training(accelerator)
    note("training step", training.step)
    if accelerator.num_processes > 1:
        note("checkpoint", lambda: training.check_round_trip(Path(settings["folder"])))
    if accelerator.is_main_process:
        write_report(settings, {})
    accelerator.end_training()


def _outcome(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `check` found; its error as text, which the command shows."""
    try:
        return {"problem": "", **check()}
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def check_collectives(device: torch.device) -> dict[str, Any]:
    """Add, gather and pass on numbers whose results are known; every rank calls it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.full((1000,), float(rank + 1), device=device)
    added = mine.clone()
    dist.all_reduce(added)
    everyones = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(everyones, mine)
    passed_on = torch.empty_like(mine)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + 1) % num_ranks),
            dist.P2POp(dist.irecv, passed_on, (rank - 1) % num_ranks),
        ]
    )
    for request in requests:
        request.wait()
    results = {
        "all_reduce": (added, sum(range(1, num_ranks + 1))),
        **{f"all_gather from rank {i}": (tensor, i + 1) for i, tensor in enumerate(everyones)},
        "send and receive": (passed_on, (rank - 1) % num_ranks + 1),
    }
    for name, (tensor, wanted) in results.items():
        if not bool((tensor == wanted).all()):
            return {"problem": f"{name} gave {tensor[0].item():g} instead of {wanted}"}
    return {"found": f"all_reduce, all_gather, send and receive over {dist.get_backend()}"}


class Training:
    """A tiny GPT and one batch, the same on every layout."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Prepare the model; every rank constructs it."""
        torch.manual_seed(0)
        model = GPT2LMHeadModel(_CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = torch.randint(_CONFIG.vocab_size, (4, _CONFIG.n_positions))
        self._accelerator = accelerator
        self._batch = {"input_ids": rows.to(accelerator.device)}
        self._batch["labels"] = self._batch["input_ids"]
        self._model, self._optimizer = accelerator.prepare(model, optimizer)

    def step(self) -> dict[str, Any]:
        """Do one update; return its loss and gradient norm."""
        loss = self._model(**self._batch).loss
        self._accelerator.backward(loss)
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    def check_round_trip(self, folder: Path) -> dict[str, Any]:
        """Save, do an update, load, and do it again: it must be the same one."""
        self._accelerator.save_state(folder / "checkpoint")
        before = self.step()
        self._accelerator.load_state(folder / "checkpoint")
        after = self.step()
        if not are_close(after, before):  # sums on a GPU may be in another order each time
            return {"problem": f"the update after loading has {after}, the one before {before}"}
        return {"found": "saved and loaded; the next update is the one it was"}


if __name__ == "__main__":
    main()
