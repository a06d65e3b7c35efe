"""Writes docs/families.md, and Llama's table in docs/weights.md, from the tables of the code.

With --check it writes nothing and fails if a file is not what the code says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

from transformers import AutoConfig

from accelerate_megatron.models.family import Family
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.registry import FAMILIES
from accelerate_megatron.models.shape import ModelShape

# Defaults of transformers that no real model has.
_SETTINGS = {"glm4_moe": {"head_dim": 128}}
Rows = Mapping[str, Parameter]
FILE = Path(__file__).with_name("families.md")
WEIGHTS = Path(__file__).with_name("weights.md")
HEAD = """# Model families

Written by `docs/write_families.py` from the tables in `src/accelerate_megatron/models`; do not
edit. `{layer}` counts from 0. Rows marked *option* are there only with the biases, the untied
output layer, the head or whatever else the config switches on. A `BertModel` alone lacks the prefix
`bert.`. What the kinds mean is drawn in
[weights.md](weights.md).
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    texts = {FILE: families_text(), WEIGHTS: weights_text()}
    if not parser.parse_args().check:
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
        return 0
    old = [file.name for file, text in texts.items() if file.read_text(encoding="utf-8") != text]
    if not old:
        return 0
    print(
        f"{', '.join(old)}: not what the code says; run python {Path(__file__).name}.",
        file=sys.stderr,
    )
    return 1


def weights_text() -> str:
    """Return docs/weights.md with Llama's table between its marks."""
    table = "\n".join(_table(*_rows(FAMILIES["llama"].parameters, FAMILIES["llama"])))
    text = WEIGHTS.read_text(encoding="utf-8")
    marks = r"(<!-- names -->\n).*(<!-- /names -->)"
    found, count = re.subn(marks, lambda m: f"{m[1]}{table}{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{WEIGHTS.name} has the marks of the table {count} times, not once")
    return found


def families_text() -> str:
    return "\n".join([HEAD, *(_section(family) for _, family in sorted(FAMILIES.items()))])


def _section(family: Family) -> str:
    module = sys.modules[family.shape.__module__]
    summary = (module.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    lines = [f"## {family.model_type}", "", f"`{', '.join(family.architectures)}`. {summary}", ""]
    always, options = _rows(family.parameters, family)
    lines += _table(always, options)
    if family.disk_rows:
        lines += ["In files these are others:", "", *_table(family.disk_rows, {})]
    return "\n".join(lines)


def _table(always: Rows, options: Rows) -> list[str]:
    lines = ["| Megatron | kind | Hugging Face |", "| --- | --- | --- |"]
    for name, parameter in {**always, **options}.items():
        kind = type(parameter).__name__ + ("" if name in always else ", *option*")
        lines.append(f"| `{name}` | {kind} | {'<br>'.join(_names(parameter))} |")
    return [*lines, ""]


def _rows(table: Callable[[ModelShape], Rows], family: Family) -> tuple[Rows, Rows]:
    """Return the rows that every model of a family has, and those that some have."""
    tables = [table(shape) for shape in _variants(family)]
    merged = {name: parameter for rows in tables for name, parameter in rows.items()}
    always = {name: row for name, row in merged.items() if all(name in rows for rows in tables)}
    return always, {name: merged[name] for name in merged if name not in always}


def _variants(family: Family) -> Iterator[ModelShape]:
    """Yield shapes with every switch of the tables off and on."""
    settings = _SETTINGS.get(family.model_type, {})
    shape = family.shape(AutoConfig.for_model(family.model_type, **settings))
    yield shape
    if shape.encoder is not None:
        for head in ("pretraining", "classification"):
            yield replace(shape, encoder=replace(shape.encoder, head=head))
        return
    yield replace(shape, tied_embeddings=not shape.tied_embeddings)
    for switch in ("qkv_bias", "attention_output_bias", "linear_bias", "qk_norm"):
        yield replace(shape, **{switch: not getattr(shape, switch)})


def _names(parameter: Parameter) -> list[str]:
    names = []
    for field in fields(parameter):
        value = getattr(parameter, field.name)
        if isinstance(value, str):
            names.append(f"`{value}`")
        elif field.name == "transposed" and value:
            names[-1] += " (transposed)"
    return names


if __name__ == "__main__":
    sys.exit(main())
