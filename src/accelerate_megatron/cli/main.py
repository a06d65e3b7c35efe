"""`accelerate-megatron`: finds the command and hands it the rest of the line."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from accelerate_megatron import __version__

# Each command, the module that runs it, and its line in the overview. The module is imported
# only when its command is called: launching should not wait for what `env` reads.
_COMMANDS = {
    "launch": ("accelerate_megatron.cli.launch", "start a script on N ranks"),
    "plan": ("accelerate_megatron.cli.plan", "the layouts a model can train in, best first"),
    "import": ("accelerate_megatron.cli.import_", "Hugging Face weights into a checkpoint"),
    "export": ("accelerate_megatron.cli.export", "a checkpoint into a Hugging Face folder"),
    "verify": ("accelerate_megatron.cli.verify", "compare a Hugging Face model with ours"),
    "generate": ("accelerate_megatron.cli.generate", "continue text with a model"),
    "ckpt": ("accelerate_megatron.cli.ckpt", "inspect, validate or list checkpoints"),
    "data": ("accelerate_megatron.cli.data", "build, inspect or merge indexed datasets"),
    "doctor": ("accelerate_megatron.cli.doctor", "check this machine, and say what mends it"),
    "env": ("accelerate_megatron.cli.env", "show versions, devices, cores and threads"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The words after the program's name; the process's own when None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in _COMMANDS:
        print(_unknown_command(words[0]), file=sys.stderr)
        return 2
    module = importlib.import_module(_COMMANDS[words[0]][0])
    status: int = module.main(words[1:])
    return status


def _overview() -> str:
    lines = [f"  {name:<8} {what}" for name, (_, what) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: accelerate-megatron COMMAND ...",
            "",
            *lines,
            "",
            "accelerate-megatron COMMAND --help tells more; --version prints the version.",
        ]
    )


def _unknown_command(word: str) -> str:
    close = difflib.get_close_matches(word, _COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_COMMANDS)}."
    return f"accelerate-megatron: no command {word!r}; {hint}"
