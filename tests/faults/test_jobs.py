"""Whole jobs, started by the launcher, to which something happens: how they end, and go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
ENV = {
    **os.environ,
    "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
SCRIPT = str(REPOSITORY / "tests/faults/job.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start(
    num_ranks: int,
    *args: Any,
    flags: tuple[str, ...] = (),
    script: str = SCRIPT,
    **env: str,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "accelerate_megatron", "launch", "--cpu"),
            *("--threads", "1", "--num_processes", str(num_ranks), *flags),
            *(script, *map(str, args)),
        ],
        cwd=REPOSITORY,
        env={**ENV, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(job: subprocess.Popen[str], timeout: float = 400.0) -> tuple[int, str]:
    """Return status and output of a job, and check that none of its processes is left."""
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, 9)
        output, _ = job.communicate()
        raise AssertionError(f"the job did not end in {timeout} s:\n{output[-6000:]}") from None
    assert left_of(job.pid) == [], "processes are left"
    return job.returncode, output


def left_of(session: int, seconds: float = 30.0) -> list[int]:
    """Return the processes of a session that are still there after some time."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six updates on two ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("clean")
    status, output = end(start(2, folder, 6))
    assert status == 0, output[-6000:]
    return folder


def check_equal(folder: Path, clean: Path) -> None:
    assert losses(folder) == losses(clean)
    weights, wanted = torch.load(folder / "weights.pt"), torch.load(clean / "weights.pt")
    for name, value in wanted.items():
        assert torch.equal(weights[name], value), name


def test_a_script_without_a_main_guard_trains_and_saves(clean: Path) -> None:
    assert (clean / "checkpoints/latest").read_text() == "checkpoint_2\n"
    assert sorted(losses(clean)) == [1, 2, 3, 4, 5, 6]


def test_a_rank_killed_in_mid_step_ends_the_job_and_is_named(tmp_path: Path) -> None:
    flags = ("--tp_degree", "2", "--pp_degree", "2")

    status, output = end(start(4, tmp_path, 6, "kill-in-step", 3, 2, flags=flags))

    assert status == 128 + 9, output[-6000:]
    assert re.search(r"rank\s*:\s*2 ", output), output[-6000:]
    assert "SIGKILL" in output


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_max_restarts_goes_on_from_the_last_checkpoint(
    fault: str, tmp_path: Path, clean: Path
) -> None:
    flags = ("--max_restarts", "1")

    status, output = end(start(2, tmp_path, 6, fault, 5, 1, flags=flags))

    assert status == 0, output[-6000:]
    check_equal(tmp_path, clean)


def test_sigterm_saves_after_the_step_and_the_next_job_goes_on(tmp_path: Path, clean: Path) -> None:
    status, output = end(start(2, tmp_path, 6, "term", 3, 1))
    assert status == 0, output[-6000:]
    assert sorted(losses(tmp_path)) == [1, 2, 3]
    manifest = json.loads((tmp_path / "checkpoints/checkpoint_0/manifest.json").read_text())
    assert manifest["step"] == 3

    status, output = end(start(2, tmp_path, 6))

    assert status == 0, output[-6000:]
    check_equal(tmp_path, clean)


def test_sigterm_to_the_launcher_saves_too(tmp_path: Path) -> None:
    job = start(2, tmp_path, 100000, "term", 0)
    deadline = time.monotonic() + 300
    while not (tmp_path / "losses.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert job.poll() is None, end(job)

    job.terminate()
    status, output = end(job)

    assert status == 128 + 15, output[-6000:]
    assert (tmp_path / "checkpoints/latest").read_text() == "checkpoint_0\n"


def test_a_rank_that_hangs_in_its_dataloader_is_shown_and_ends_the_job(tmp_path: Path) -> None:
    flags = ("--tp_degree", "2")

    # Long enough for the steps before, on a machine that has much else to do.
    job = start(2, tmp_path, 6, "hang", 2, 0, flags=flags, TEST_HANG_SECONDS="15")
    status, output = end(job)

    assert status == 75, output[-6000:]
    assert "Rank 0 has been fetching a batch for 15 s" in output
    assert re.search(r"^rank 0: .* in __getitem__$", output, re.M), "its stack is shown"
