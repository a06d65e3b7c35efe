"""Writes docs/errors.md from the code: `python docs/write_errors.py`.

Causes and cures are the docstrings of `errors.py`; the messages are read from the sources, where
errors are made and where functions list problems. With --check it writes nothing and fails if the
file is not what the code says.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from generated import write_or_check

from accelerate_megatron import errors
from accelerate_megatron.cli.command_line import UsageError

FILE = Path(__file__).with_name("errors.md")
SOURCES = Path(errors.__file__).parent
HEAD = """# Errors

Written by `docs/write_errors.py` from the code; do not edit. All of them are in
`accelerate_megatron.errors`, under names that do not change. A message says the value as it was
given, the rule it breaks, and what works; it is the same on every rank unless it names ranks.

Below each error are the texts it can have, with `{...}` where a value stands, so that a part of a
message finds its place here. Texts that are put together of parts are not all shown.

A job ends with the status of the first rank that failed: 128 + n when signal n ended it, 75 when
it was stuck (`FaultPolicy.hang_seconds`), 2 when the command line was wrong. Whether the machine
itself is in order says `accelerate-megatron doctor`.
"""
_KINDS = [
    *(
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
    UsageError,
]
# In these modules, what functions with these words in their names return are texts of an error.
_CHECK_SETTINGS = ("config/", "generation/", "plugin.py")
_LISTS_PROBLEMS = re.compile(r"problem|contradiction|out_of_range|unknown_names|uneven")


def main() -> int:
    return write_or_check(FILE, errors_text, __doc__.splitlines()[0])


def errors_text() -> str:
    messages: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(SOURCES.rglob("*.py")):
        module = path.relative_to(SOURCES).as_posix()
        for kind, message in messages_of(ast.parse(path.read_text(encoding="utf-8")), module):
            messages[kind].setdefault(message, module)
    return "\n".join([HEAD, *(_section(kind, messages[kind.__name__]) for kind in _KINDS)])


def _section(kind: type[Exception], messages: dict[str, str]) -> str:
    cause, _, cure = (kind.__doc__ or "").partition("\n\n")
    bases = " and a ".join(f"`{base.__name__}`" for base in kind.__bases__)
    cause, cure = (" ".join(part.split()) for part in (cause, cure))
    lines = [f"## {kind.__name__}", "", f"A {bases}. {cause}", "", f"**Cure**: {cure[6:]}", ""]
    for message, module in messages.items():
        lines.append(f"- {_code(message)} (`{module}`)")
    return "\n".join([*lines, ""])


def _code(text: str) -> str:
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if len(ticks) > 1 else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def messages_of(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Yield (name of the error, text) for each text of an error that stands in a module."""
    names = {kind.__name__ for kind in _KINDS}
    checks_settings = module.startswith(_CHECK_SETTINGS)
    kind_of_settings = "GenerationError" if "generation" in module else "ConfigurationError"
    for node in ast.walk(tree):
        if checks_settings and isinstance(node, ast.FunctionDef):
            if _LISTS_PROBLEMS.search(node.name):
                yield from ((kind_of_settings, text) for text in _sentences(node))
        elif isinstance(node, ast.Call) and node.args:
            kind = getattr(node.func, "id", None)
            if kind in names and (text := template(node.args[0])):
                yield kind, text


def _sentences(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the texts in a function that end as a sentence does, without its docstring."""
    inner: set[ast.AST] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.JoinedStr):
            inner |= {part for part in ast.walk(node) if part is not node}
    for node in ast.walk(function):
        if node in inner or (isinstance(node, ast.Constant) and node.value == _doc(function)):
            continue
        text = template(node)
        if text and " " in text and text.rstrip()[-1:] in ".!)":
            yield text


def _doc(function: ast.FunctionDef) -> str | None:
    return ast.get_docstring(function, clean=False)


def template(node: ast.AST) -> str | None:
    """Return the text of a string, with the code of each value in braces; None: no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for value in node.values:
        if isinstance(value, ast.FormattedValue):
            name = ast.unparse(value.value)
            parts.append("{" + (name if re.fullmatch(r"[\w.]+", name) else "...") + "}")
        else:
            parts.append(str(value.value))  # type: ignore[attr-defined]
    return " ".join("".join(parts).split())


if __name__ == "__main__":
    sys.exit(main())
