"""Writes docs/arguments.md from the tables of the code: `python docs/write_arguments.py`.

With --check it writes nothing and fails if the file is not what the code says.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from generated import write_or_check

from accelerate_megatron.config.argument_refusals import REFUSED
from accelerate_megatron.config.argument_table import ARGUMENTS, PLUGIN_FIELDS
from accelerate_megatron.config.arguments import ASKED, known_names

FILE = Path(__file__).with_name("arguments.md")
HEAD = """# Megatron's arguments

Written by `docs/write_arguments.py` from `config/argument_table.py` and `argument_refusals.py`; do
not edit. A flag of Megatron-LM's, `--clip-grad 1.0`, is `clip_grad` here, with an answer of four
kinds:

- a **field** of `MegatronLMPlugin`: set it there, or as a flag of `accelerate-megatron launch`;
- **given** in `MegatronLMPlugin(other_megatron_args={"name": value})`;
- **fixed** by the model, the data or the number of ranks: it may be repeated there, and is refused
  when it says something else;
- **refused**, with the reason.

A name without any of them is refused as a spelling, with the nearest ones. In
[plugin.md](plugin.md) is what each field does.
"""


def main() -> int:
    return write_or_check(FILE, arguments_text, __doc__.splitlines()[0])


def arguments_text() -> str:
    return "\n".join([HEAD, *_fields(), *_given(), *_shown(), *_refused()])


def _fields() -> list[str]:
    own = [name for name in known_names() if name not in {*ARGUMENTS, *REFUSED, *PLUGIN_FIELDS}]
    return [
        "## Fields",
        "",
        "| Megatron's | field of the plugin |",
        "| --- | --- |",
        *(f"| `{name}` | `{field}` |" for name, field in PLUGIN_FIELDS.items()),
        "",
        f"Under one name in both: {_listed(own)}.",
        "",
    ]


def _given() -> list[str]:
    rows = []
    for name, argument in ARGUMENTS.items():
        if argument.home in ("fixed", "steps"):
            continue
        kind = " or ".join(f"`{word}`" for word in argument.choices) or argument.kind
        rows.append(f"| `{name}` | {kind} | {ASKED.get(argument.needs, argument.needs)} |")
    heading = ["| argument | value | has an effect with |", "| --- | --- | --- |"]
    return ["## Given in other_megatron_args", "", *heading, *rows, ""]


def _shown() -> list[str]:
    fixed = [name for name, argument in ARGUMENTS.items() if argument.home == "fixed"]
    steps = [name for name, argument in ARGUMENTS.items() if argument.home == "steps"]
    return [
        "## Fixed",
        "",
        f"{_listed(fixed)}.",
        "",
        f"Passed on to train steps, and read by nothing else: {_listed(steps)}.",
        "",
    ]


def _refused() -> list[str]:
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, reason in REFUSED.items():
        names_of[reason].append(name)
    lines = ["## Refused", ""]
    for reason, names in names_of.items():
        lines += [f"{reason[0].upper()}{reason[1:]}:", f"{_listed(sorted(names))}.", ""]
    return lines


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
