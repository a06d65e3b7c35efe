"""The SLURM script starts a launcher on each node that belongs to one job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "slurm.sh"

# Stand-ins that do what SLURM's commands do with the options used: srun runs the command once for
# each of two nodes, with its number; scontrol lists the nodes, more than a pipe holds.
SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 && $2 == --cpus-per-task=64 ]] && shift 2
for node in 0 1; do SLURM_NNODES=2 SLURM_NODEID=$node "$@" || exit $?; done
"""
SCONTROL = """#!/bin/bash
[[ $* == 'show hostnames a[1-99999]' ]] && for node in {1..99999}; do echo "a$node"; done
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    programs = {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "accelerate-megatron": f'#!/bin/bash\nexec {sys.executable} -m accelerate_megatron "$@"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        env={
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY / "src"),
            "SLURM_JOB_NODELIST": "a[1-99999]",
            "SLURM_JOB_ID": "123456",
            "SLURM_CPUS_PER_TASK": "64",
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_each_node_starts_its_part_of_one_job(tmp_path: Path) -> None:
    train = tmp_path / "train it.py"
    train.write_text("")

    result = run(
        *(tmp_path, "--cpu", "--num_processes", "8", "--tp_degree", "2", "--dry-run", "--json"),
        *(str(train), "--lr", "3"),
    )

    assert result.returncode == 0, result.stderr
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(result.stdout)
    second, _ = decoder.raw_decode(result.stdout[end:].lstrip())
    for node, plan in enumerate((first, second)):
        assert plan["num_processes"] == 4
        assert plan["env"]["MEGATRON_LM_TP_DEGREE"] == "2"
        words = ("--nnodes=2", f"--node-rank={node}", "--master-addr=a1", "--master-port=23456")
        assert set(words) <= set(plan["command"])
        assert plan["command"][-3:] == [str(train), "--lr", "3"]


def test_without_a_script_it_says_how_it_is_used(tmp_path: Path) -> None:
    result = run(tmp_path)

    assert result.returncode == 2
    assert "usage: sbatch" in result.stderr
