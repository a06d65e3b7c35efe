"""Writes docs/plugin.md from the table of the code: `python docs/write_plugin.py`.

With --check it writes nothing and fails if the file is not what the code says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check
from plugin_effects import EFFECTS

from accelerate_megatron.config.plugin_fields import FIELDS, PluginField

FILE = Path(__file__).with_name("plugin.md")
HEAD = """# The fields of MegatronLMPlugin

Written by `docs/write_plugin.py` from `config/plugin_fields.py`; do not edit. Names, order and
signature are Accelerate's. A field that is left out takes its environment variable,
`MEGATRON_LM_` and the name in capitals, then what the model's config says, then the value below;
as a flag of `accelerate-megatron launch` it is `--name`. Booleans are the words true, 1, yes, on,
false, 0, no, off.

"Seen in a run" is what a test sees on CPU ranks; the tests are under `tests/`. Nothing was run
on CUDA yet.

"""


def main() -> int:
    return write_or_check(FILE, plugin_text, __doc__.splitlines()[0])


def plugin_text() -> str:
    lines = [
        HEAD + f"## The {len(FIELDS)} fields",
        "",
        "| field | value if left out | what it does | seen in a run | refused |",
        "| --- | --- | --- | --- | --- |",
        *(_row(field) for field in FIELDS),
        "",
        "### The tests",
        "",
        "| field | test |",
        "| --- | --- |",
        *(f"| `{field.name}` | `{EFFECTS[field.name].test}` |" for field in FIELDS),
        "",
    ]
    return "\n".join(lines)


def _row(field: PluginField) -> str:
    effect = EFFECTS[field.name]
    cells = [f"`{field.name}`", _default(field), _meaning(field), effect.seen, effect.refused]
    return f"| {' | '.join(cells)} |"


def _default(field: PluginField) -> str:
    return "" if field.default is None else f"`{field.default}`"


def _meaning(field: PluginField) -> str:
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    return field.help + choices


if __name__ == "__main__":
    sys.exit(main())
