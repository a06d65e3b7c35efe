"""Nothing needs `megatron.training` or `megatron.legacy`, which wheels may hold or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[1]

# Found by every Python process of the test, also those that a command starts.
SITE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("megatron.training", "megatron.legacy", "pretrain_", "gpt_builders")):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Blocker())
"""

SCRIPT = """
import sys
import torch
from accelerate_megatron import Accelerator
from accelerate_megatron.cli.main import main
from tests.helpers.tiny_models import pad_samples, ragged_samples, tiny_gpt2

folder = sys.argv[1]
hf_model = tiny_gpt2(n_layer=1)
hf_model.save_pretrained(f"{folder}/hf")
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(hf_model, torch.optim.AdamW(hf_model.parameters()))
accelerator.backward(model(**pad_samples(ragged_samples(2))).loss)
accelerator.save_state(f"{folder}/state")
accelerator.end_training()
statuses = [
    main(["export", f"{folder}/state", "--output", f"{folder}/exported", "--cpu"]),
    main(["import", f"{folder}/hf", "--output", f"{folder}/imported", "--cpu"]),
    main(["export", f"{folder}/imported", "--output", f"{folder}/back", "--cpu"]),
]
print("statuses", *statuses, "cuda", torch.cuda.is_initialized())
"""


@pytest.mark.timeout(900)
@pytest.mark.slow  # it starts a training and three commands, each with all its imports
def test_training_and_conversion_import_neither_and_never_start_cuda(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, REPOSITORY / "src", REPOSITORY))),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "statuses 0 0 0 cuda False"
    assert (tmp_path / "exported" / "config.json").is_file()
    given, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert given.keys() == back.keys()
    assert all(torch.equal(value, back[name]) for name, value in given.items())
