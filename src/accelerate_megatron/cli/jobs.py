"""Commands that need ranks: they start themselves again under the launcher and read the result.

The flags that a command does not know are the launcher's: layout, number of ranks, CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_megatron.cli import launch
from accelerate_megatron.cli.command_line import UsageError, unknown_flag

PRECISIONS = {"float32": "no", "bfloat16": "bf16"}
"""Words for `--dtype`, and Accelerate's for `mixed_precision`."""


def parse_with_launcher_flags(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's own arguments, and the launcher's flags with their values, in any order.

    A flag that is both is the command's. What is neither ends the process with the usage.
    """
    own = {
        spelling: action.nargs != 0
        for action in parser._actions
        for spelling in action.option_strings
    }
    _, launchers = launch.make_parser()
    takes_value = {**launchers, **own}
    own_words: list[str] = []
    flags: list[str] = []
    at = 0
    while at < len(words):
        flag, has_equals, _ = words[at].partition("=")
        if flag.replace("-", "_") == "__mixed_precision":
            parser.error(f"{flag}: this command is told by --dtype.")
        if flag.startswith("-") and flag not in takes_value:
            parser.error(unknown_flag(flag, takes_value))
        length = 2 if takes_value.get(flag) and not has_equals else 1
        is_launchers = flag in launchers and flag not in own
        (flags if is_launchers else own_words).extend(words[at : at + length])
        at += length
    args, stray = parser.parse_known_args(own_words)
    if stray:
        parser.error(f"{stray[0]}: one argument too many; --help lists them.")
    return args, flags


def run_job(module: str, settings: dict[str, Any], flags: Sequence[str]) -> dict[str, Any] | None:
    """Run `module` on the ranks that `flags` ask for; return what it reported.

    Args:
        module: A module whose `main` takes the path of a JSON file of settings, and writes what
            it has to report into the file that `settings["report"]` names.
        settings: Its settings, as JSON holds them.
        flags: The launcher's flags.

    Returns:
        The report; None when a rank failed, after its error was printed.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate-megatron-") as folder:
        report = Path(folder) / "report.json"
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps({**settings, "report": str(report)}), encoding="utf-8")
        status = launch.main([*flags, "--module", module, str(path)])
        if status != 0 or not report.is_file():
            return None
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def check_model_folder(folder: str) -> None:
    """Refuse a folder without a config: transformers would take it for a name on the hub.

    Raises:
        UsageError: There is no `config.json` in it.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json; name the folder of a Hugging Face model.")


def settings_of_rank() -> dict[str, Any]:
    """Return the settings that `run_job` wrote, on a rank."""
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return settings


def write_report(settings: dict[str, Any], report: dict[str, Any]) -> None:
    """Hand the report to the process that called `run_job`; one rank calls it."""
    Path(settings["report"]).write_text(json.dumps(report), encoding="utf-8")
