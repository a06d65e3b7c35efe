"""Measured parts of a page, between comments that name them: nothing there is typed by hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Return `text` with what stands between `<!-- NAME -->` and `<!-- /NAME -->` replaced."""
    for name, body in parts.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        lines = f"{body}\n" if body else ""
        text = marked.sub(lambda found, lines=lines: f"{found[1]}{lines}{found[2]}", text)
    return text


def write_or_check(file: Path, text: str) -> int:
    """Write a file, or with --check only say, by the exit status, whether it is so already."""
    if "--check" not in sys.argv[1:]:
        file.write_text(text)
        return 0
    differs = not file.is_file() or file.read_text() != text
    if differs:
        print(f"{file} is not what the results say; run {sys.argv[0]}.")
    return int(differs)
