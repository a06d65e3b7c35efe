"""The entry point: overview, version, unknown commands, `python -m`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import accelerate_megatron
from accelerate_megatron.cli.main import main


def test_the_overview_names_each_command(capsys):
    assert main(["--help"]) == 0

    text = capsys.readouterr().out

    assert "launch" in text
    assert "env" in text


def test_nothing_said_is_a_usage_error(capsys):
    assert main([]) == 2
    assert "usage: accelerate-megatron COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"),
    [("lunch", "no command 'lunch'; did you mean launch?"), ("xyzzy", "there are launch")],
)
def test_an_unknown_command_gets_the_nearest_name(capsys, word, message):
    assert main([word]) == 2
    assert message in capsys.readouterr().err


def test_python_dash_m_is_the_same_command():
    run = subprocess.run(
        [sys.executable, "-m", "accelerate_megatron", "--version"],
        check=True,
        capture_output=True,
        text=True,
    )

    assert run.stdout.strip() == accelerate_megatron.__version__
