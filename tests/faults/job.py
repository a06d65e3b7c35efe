"""A training script without a `__main__` guard, that something can happen to. Run by a launcher.

python -m tests.faults.job FOLDER STEPS [FAULT [AT [RANK]]]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

from accelerate_megatron import (
    Accelerator,
    FaultPolicy,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
)
from tests.helpers.tiny_models import TinyModel, TinyOptimizer, pad_samples, ragged_samples

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
fault = sys.argv[3] if len(sys.argv) > 3 else ""
at = int(sys.argv[4]) if len(sys.argv) > 4 else 0
rank = int(sys.argv[5]) if len(sys.argv) > 5 else 0
me = int(os.environ.get("RANK", "0"))


class Samples:
    def __init__(self) -> None:
        self.samples = ragged_samples(48)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if fault == "hang" and me == rank and index >= 8 * at:
            time.sleep(600)
        return self.samples[index]


torch.set_num_threads(1)
torch.manual_seed(5)
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True),
    megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, train_iters=20, lr_warmup_iters=2),
    faults=FaultPolicy(hang_seconds=float(os.environ.get("TEST_HANG_SECONDS", "60"))),
)
model = TinyModel("gpt2", changes={"resid_pdrop": 0.1}).build()
optimizer = TinyOptimizer("adamw", {"lr": 1e-3}).build(model)
dp_size = accelerator.num_processes // (
    int(os.environ.get("MEGATRON_LM_TP_DEGREE", "1"))
    * int(os.environ.get("MEGATRON_LM_PP_DEGREE", "1"))
)
loader = DataLoader(Samples(), batch_size=4 // dp_size, collate_fn=pad_samples)
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, loader, MegatronLMDummyScheduler(optimizer)
)
resumed = accelerator.load_state("auto")
done = model.session.num_updates
log = folder / "losses.jsonl"
model.train()


def die_in_step(*_: object) -> None:
    if me == rank and done == at - 1:
        os.kill(os.getpid(), signal.SIGKILL)


if fault == "kill-in-step":  # while the other stages and tensor-parallel ranks wait for this one
    model.session.chunks[0].register_forward_hook(die_in_step)
while done < steps:
    for batch in loader:
        loss = model(**batch).loss
        optimizer.step()
        done += 1
        if me == 0:
            with open(log, "a") as file:
                file.write(json.dumps([done, loss.item()]) + "\n")
        if me == rank and done == at and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise RuntimeError("it went wrong here")
            if fault == "term":
                os.kill(os.getpid(), signal.SIGTERM)
        if done % 2 == 0 and fault != "term":
            accelerator.save_state()
        if done == steps:
            break
state = accelerator.get_state_dict(model)
if state is not None:
    torch.save(state, folder / "weights.pt")
