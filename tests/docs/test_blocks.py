"""Every code block of the documentation is run, but for those that need GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of
from tests.docs.setups import SETUPS
from tests.helpers.ranks import run_ranks

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [
    block
    for block in BLOCKS
    if block.language in ("python", "diff") and block.kind in ("run", "run after")
]
NOT_COMMANDS = (None, "file", "run by")
WITH_COMMANDS = [
    page
    for page in PAGES
    if any(block.kind not in NOT_COMMANDS and block not in PYTHON for block in blocks_of(page))
]


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


def test_every_block_of_code_says_how_it_is_run() -> None:
    assert names([block for block in BLOCKS if block.needs_mark and block.kind is None]) == []


def test_every_setup_is_there_and_used() -> None:
    assert {block.what for block in BLOCKS if block.kind == "run after"} == set(SETUPS)


def test_what_runs_a_block_is_there() -> None:
    for block in BLOCKS:
        if block.kind == "run by":
            path, _, name = block.what.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).exists()


def test_only_blocks_that_start_ranks_or_jobs_need_gpus() -> None:
    for block in BLOCKS:
        if block.kind == "GPU":
            for words, _ in block.commands():
                assert words[:2] == ["accelerate-megatron", "launch"] or words[0] == "sbatch"


def run_code(code: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", PYTHON, ids=names(PYTHON))
def test_python_runs(block: Block, tmp_path: Path) -> None:
    before = SETUPS[block.what] if block.kind == "run after" else ""

    run_ranks(
        run_code,
        before + block.python(),
        str(tmp_path),
        num_ranks=block.ranks,
        env={"ACCELERATE_USE_CPU": "true"},
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_commands_run_as_printed(page: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('the page has no train.py')\n")
    for block in blocks_of(page):
        if block.kind == "file":
            file = tmp_path / block.what
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.kind not in NOT_COMMANDS and block not in PYTHON:
            run_commands(block, tmp_path)


def run_commands(block: Block, folder: Path) -> None:
    if block.kind == "run after":
        run([sys.executable, "-c", SETUPS[block.what]], block, folder)
    for words, output in block.commands():
        if block.kind == "GPU":
            if words[0] == "sbatch":
                continue
            words[2:2] = ["--dry-run", "--cpu"]
        command = {
            "accelerate-megatron": [sys.executable, "-m", "accelerate_megatron"],
            "python": [sys.executable],
        }[words[0]]
        printed = run([*command, *words[1:]], block, folder)
        if block.kind == "run: same output":
            assert printed.strip() == output.strip(), block.name


def run(command: list[str], block: Block, folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": _python_path()},
    )
    assert done.returncode == 0, f"{block.name}: {command}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def _python_path() -> str:
    """Return the search path with this repository, where setups find the tests' helpers."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
