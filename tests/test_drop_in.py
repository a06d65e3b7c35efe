"""The drop-in: Accelerate's names mean ours, for as long as it is active."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from accelerate_megatron.errors import UnsupportedError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import TWO_LAYERS

# Everything that accelerate.utils exports for Megatron-LM, with what upstream needs installed too.
EXPORTS = (
    "MegatronLMPlugin",
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "MegatronEngine",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "gather_across_data_parallel_groups",
    "megatron_lm_initialize",
    "megatron_lm_prepare_data_loader",
    "megatron_lm_prepare_model_optimizer_scheduler",
    "megatron_lm_prepare_optimizer",
    "megatron_lm_prepare_scheduler",
)

SCRIPT = """
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DistributedType, MegatronLMDummyScheduler, MegatronLMPlugin, set_seed
import sys, torch
from torch.utils.data import DataLoader
from tests.helpers.tiny_models import TinyModel, pad_samples, ragged_samples

if __name__ == "__main__":
    accelerator = Accelerator(logging_dir="/logs")  # as project_dir was once called
    assert accelerator.project_dir == "/logs"
    assert accelerator.distributed_type == DistributedType.MEGATRON_LM
    model = TinyModel("gpt2", changes={"n_layer": 2}).build()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(ragged_samples(8), batch_size=2, collate_fn=pad_samples)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, MegatronLMDummyScheduler(optimizer, total_num_steps=4)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert skip_first_batches(loader, 1) is loader
    assert len(skip_first_batches(DataLoader(range(4)), 1)) == 3
    accelerator.print(sys.argv[1:], accelerator.state.megatron_lm_plugin.tp_degree, loss.item() < 5)
"""


@pytest.fixture
def drop_in() -> Any:
    from accelerate_megatron import drop_in  # its import activates it

    yield drop_in
    drop_in.deactivate()


def test_every_name_that_accelerate_exports_for_megatron_means_ours(drop_in: Any) -> None:
    drop_in.activate()

    for name in EXPORTS:
        value = getattr(accelerate.utils, name)
        assert value.__name__ == drop_in.replacements()[name].__name__
        assert value.__module__.startswith("accelerate_megatron."), name
    assert accelerate.Accelerator is drop_in.DropInAccelerator
    assert accelerate.utils.dataclasses.MegatronLMPlugin is accelerate.utils.MegatronLMPlugin


def test_it_can_be_undone(drop_in: Any) -> None:
    drop_in.deactivate()
    before = {name: getattr(accelerate.utils, name, None) for name in EXPORTS}

    with drop_in.active():
        assert before["MegatronLMPlugin"] is not accelerate.utils.MegatronLMPlugin
        assert DistributedType.TPU is DistributedType.XLA

    assert {name: getattr(accelerate.utils, name, None) for name in EXPORTS} == before
    assert accelerate.Accelerator.__module__ == "accelerate.accelerator"
    assert not hasattr(DistributedType, "TPU")


def test_activating_twice_can_be_undone_once(drop_in: Any) -> None:
    drop_in.activate()
    with drop_in.active():
        pass
    assert accelerate.Accelerator is drop_in.DropInAccelerator

    drop_in.deactivate()
    drop_in.deactivate()

    assert accelerate.Accelerator.__module__ == "accelerate.accelerator"


def test_the_steps_of_accelerates_own_prepare_are_refused_by_name(drop_in: Any) -> None:
    drop_in.activate()

    with pytest.raises(UnsupportedError, match="megatron_lm_prepare_optimizer is a step of"):
        accelerate.utils.megatron_lm_prepare_optimizer()
    with pytest.raises(UnsupportedError, match="megatron_lm_initialize"):
        accelerate.utils.megatron_lm.initialize(None)


def train_a_script(path: str) -> None:
    from accelerate_megatron.cli import run_script

    run_script.main([path, "--lr", "3"])


def test_a_script_written_for_accelerate_trains_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    run_ranks(train_a_script, str(script), num_ranks=2, env={"MEGATRON_LM_TP_DEGREE": "2"})


OLD_FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MEGATRON_LM
downcast_bf16: 'no'
fsdp_config: {}
gpu_ids: null
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_pp_degree: 1
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: true
"""


@pytest.mark.slow
def test_the_launcher_starts_a_script_under_the_drop_in_from_an_old_file(tmp_path: Path) -> None:
    config = tmp_path / "old.yaml"
    config.write_text(OLD_FILE)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[1]

    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate_megatron", "launch", "--drop-in"),
            *("--config_file", str(config), "--threads", "1", str(script), "--lr", "3"),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "['--lr', '3'] 2 True" in done.stdout


# --- resuming as scripts written for Accelerate do -------------------------------------------

NUM_EPOCHS, SAVED_AFTER, STEPS_PER_EPOCH = 2, 3, 8


def train_and_resume(folder: str, way: str) -> tuple[list[float], Any]:
    """Train two epochs, or from the checkpoint of update 3 on; return losses and weights."""
    from accelerate_megatron import drop_in

    drop_in.activate()
    accelerator = accelerate.Accelerator(
        cpu=True,
        megatron_lm_plugin=accelerate.utils.MegatronLMPlugin(num_micro_batches=2),
    )
    accelerate.utils.set_seed(7)
    model = TWO_LAYERS.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        ragged_samples(2 * STEPS_PER_EPOCH), batch_size=1, shuffle=True, collate_fn=pad_samples
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    skipped = 0
    if way != "uninterrupted":
        accelerator.load_state(folder)
        skipped = SAVED_AFTER
    losses = []
    for epoch in range(NUM_EPOCHS):
        batches = enumerate(loader)
        if epoch == 0 and way == "skip_first_batches":
            batches = enumerate(accelerator.skip_first_batches(loader, skipped), start=skipped)
        for step, batch in batches:
            if epoch == 0 and step < skipped:
                continue
            losses.append(model(**batch).loss.item())
            if way == "uninterrupted" and len(losses) == SAVED_AFTER:
                accelerator.save_state(folder)
    return losses, model.gather_state_dict()


@pytest.mark.parametrize(
    "way", ["continue", pytest.param("skip_first_batches", marks=pytest.mark.slow)]
)
def test_a_script_that_skips_the_used_batches_itself_resumes_bit_for_bit(
    tmp_path: Path, way: str
) -> None:
    folder = str(tmp_path / "step_3")
    [(losses, weights)] = run_ranks(train_and_resume, folder, "uninterrupted", num_ranks=1)

    [(resumed, same_weights)] = run_ranks(train_and_resume, folder, way, num_ranks=1)

    assert len(losses) == NUM_EPOCHS * STEPS_PER_EPOCH
    assert resumed == losses[SAVED_AFTER:]
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
