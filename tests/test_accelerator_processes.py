"""`Accelerator` in processes of its own, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from accelerate_megatron.state import leave_process_group
from tests.helpers.ports import held_port

REPOSITORY = Path(__file__).resolve().parents[1]

SCRIPT = """
import torch
from accelerate_megatron import Accelerator, MegatronLMPlugin
from tests.helpers.tiny_models import pad_samples, ragged_samples, tiny_gpt2

accelerator = Accelerator({arguments})
model = tiny_gpt2(n_layer=1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(ragged_samples(4), batch_size=2, collate_fn=pad_samples)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
accelerator.print(accelerator.distributed_type, accelerator.device, accelerator.num_processes)
accelerator.wait_for_everyone()
accelerator.end_training()
"""


def run(arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    usual = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_LM")}
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(arguments=arguments)],
        # Unbuffered, a line is written in parts, between which another rank's may come.
        env={**usual, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **env},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        ("cpu=True", {}),
        ("", {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_MEGATRON_LM": "true"}),
    ],
    ids=["argument", "environment"],
)
def test_plain_python_is_one_rank(arguments: str, env: dict[str, str]) -> None:
    result = run(arguments, **env)

    assert result.returncode == 0, result.stderr
    assert result.stdout == "DistributedType.MEGATRON_LM cpu 1\n"


def test_a_bad_word_for_the_cpu_is_refused() -> None:
    result = run("", ACCELERATE_USE_CPU="perhaps")

    assert result.returncode != 0
    assert "ACCELERATE_USE_CPU is 'perhaps'; it must be one of true" in result.stderr


NOTEBOOK = "import sys, types; sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"


def test_a_notebook_is_one_rank_and_is_told_how_to_get_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", NOTEBOOK + SCRIPT)

    result = run("cpu=True")

    assert result.returncode == 0, result.stderr
    assert result.stdout == "DistributedType.MEGATRON_LM cpu 1\n"
    assert result.stderr.count("accelerate-megatron launch --num_processes N") == 1


@pytest.mark.slow
def test_a_notebook_that_asks_for_more_ranks_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", NOTEBOOK + SCRIPT)

    result = run("cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2)")

    assert result.returncode != 0
    assert "1 ranks cannot hold tp_degree=2" in result.stderr
    assert "accelerate-megatron launch --num_processes N" in result.stderr


LAUNCHED_FROM_A_NOTEBOOK = (
    NOTEBOOK
    + """
import accelerate_megatron.drop_in
from accelerate import notebook_launcher

def train(tp_degree):
    import torch
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMPlugin
    from tests.helpers.tiny_models import pad_samples, ragged_samples, tiny_gpt2

    plugin = MegatronLMPlugin(tp_degree=tp_degree)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model = tiny_gpt2(n_layer=1)
    hf_loss = model(**pad_samples(ragged_samples(2))).loss.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(ragged_samples(2), batch_size=2, collate_fn=pad_samples)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
    is_right = abs(loss.item() - hf_loss) < 1e-5
    print("rank", accelerator.process_index, accelerator.num_processes, is_right, flush=True)
    accelerator.end_training()

notebook_launcher(train, (2,), num_processes=2, use_port="{port}")
print("the kernel goes on")
"""
)


@pytest.mark.slow
def test_accelerates_notebook_launcher_starts_ranks_under_the_drop_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with held_port() as port:
        script = LAUNCHED_FROM_A_NOTEBOOK.replace("{port}", str(port))
        monkeypatch.setattr(sys.modules[__name__], "SCRIPT", script)

        result = run("")

    assert result.returncode == 0, result.stderr[-3000:]
    told = [line for line in result.stdout.splitlines() if line.startswith("rank")]
    assert sorted(told) == ["rank 0 2 True", "rank 1 2 True"]
    assert "the kernel goes on" in result.stdout
    assert "is one rank" not in result.stderr


LAST_COLLECTIVE = """
import time
import torch
import torch.distributed as dist
from accelerate_megatron import Accelerator

accelerator = Accelerator(cpu=True)
work = dist.all_reduce(torch.ones(()), async_op=True)
work.get_future().then(lambda done: time.sleep(2))  # in the group's thread, when Python ends
"""


def test_a_script_without_end_training_does_not_abort_at_exit() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LAST_COLLECTIVE],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("failure", "owner", "left"),
    [(None, os.getpid(), True), (ValueError, os.getpid(), False), (None, -1, False)],
    ids=["finished", "uncaught exception", "forked child"],
)
def test_the_process_group_is_left_by_a_process_that_finished(
    monkeypatch: pytest.MonkeyPatch, failure: type[BaseException] | None, owner: int, left: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sys, "last_type", failure, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))

    leave_process_group(owner)

    assert bool(calls) is left
