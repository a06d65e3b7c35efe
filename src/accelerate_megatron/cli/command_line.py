"""Where the launcher's own flags end and the script's begin, and what to say to a wrong flag."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class UsageError(ValueError):
    """A command line that cannot be carried out. Printed after the usage, with status 2.

    Cure: correct the flag as the message says; COMMAND --help lists the flags.
    """


@dataclass(frozen=True)
class CommandLine:
    """A launcher's command line, cut at the script."""

    own: list[str]
    """The launcher's flags with their values."""
    script: str | None
    script_args: list[str]


def split_command_line(words: Sequence[str], *, takes_value: dict[str, bool]) -> CommandLine:
    """Cut `words` at the first that is neither a known flag nor a flag's value.

    Args:
        words: The command line after the command's name.
        takes_value: Each known spelling of a flag, and whether a value follows it.

    Raises:
        UsageError: A word before the script looks like a flag and is none.
    """
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return _cut(words[:at], words[at + 1 :])
        if not word.startswith("-"):
            break
        flag, has_equals, _ = word.partition("=")
        if flag not in takes_value:
            hint = "The script's own arguments come after the script."
            raise UsageError(f"{unknown_flag(flag, takes_value)} {hint}")
        at += 2 if takes_value[flag] and not has_equals else 1
    return _cut(words[:at], words[at:])


def _cut(own: Sequence[str], rest: Sequence[str]) -> CommandLine:
    return CommandLine(own=list(own), script=rest[0] if rest else None, script_args=list(rest[1:]))


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """Return what to say to a flag that is none of the `known` ones."""
    plain = {_plain(spelling): spelling for spelling in reversed(list(known))}
    close = difflib.get_close_matches(_plain(flag), plain, n=3)
    if close:
        hint = f"did you mean {' or '.join(plain[name] for name in close)}?"
    else:
        hint = "--help lists the flags."
    return f"{flag}: no such flag; {hint}"


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower().removeprefix("megatron_lm_")
