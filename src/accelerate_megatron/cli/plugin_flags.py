"""MegatronLMPlugin's fields as command-line flags; the values travel as environment variables.

The fields, their kinds and their help come from `config.plugin_fields`. A field that holds a
Python object has no flag.
"""

from __future__ import annotations

import argparse

from accelerate_megatron.config.plugin_fields import FIELDS, PluginField

FLAG_FIELDS = tuple(field for field in FIELDS if field.kind != "object")

_METAVARS = {"int": "N", "float": "X", "bool": "true|false", "ints": "N,N,N", "str": "WORD"}


def add_plugin_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Add a flag for each field."""
    group = parser.add_argument_group("MegatronLMPlugin")
    return [action for field in FLAG_FIELDS for action in _add_flag(group, field)]


def _add_flag(group: argparse._ArgumentGroup, field: PluginField) -> list[argparse.Action]:
    """Add the three spellings of a field, of which --help shows the first."""
    metavar = _METAVARS[field.kind]
    choices = f": {', '.join(field.choices)}" if field.choices else ""
    default = "" if field.default is None else f" ({str(field.default).lower()})"
    shown = group.add_argument(
        f"--{field.name}", dest=field.name, metavar=metavar, help=f"{field.help}{choices}{default}"
    )
    hidden = group.add_argument(
        f"--{field.name.replace('_', '-')}",
        f"--megatron_lm_{field.name}",
        dest=field.name,
        metavar=metavar,
        help=argparse.SUPPRESS,
    )
    return [shown, hidden]


def plugin_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables for the flags that were given, each value checked.

    Raises:
        ConfigurationError: A value is not of its field's kind; the message names the flag.
    """
    variables = {}
    for field in FLAG_FIELDS:
        word = getattr(args, field.name)
        if word is not None:
            field.parse(word, f"--{field.name}")
            variables[field.variable] = word
    return variables
