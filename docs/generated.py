"""What scripts that write a page from the code do with its text: write it, or compare it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(file: Path, text_of: Callable[[], str], description: str) -> int:
    """Write the page; with --check change nothing, and return 1 if it is another text.

    Args:
        file: The page.
        text_of: Makes its text.
        description: Of the script, for --help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    checks = parser.parse_args().check
    text = text_of()
    if not checks:
        file.write_text(text, encoding="utf-8")
        return 0
    if file.read_text(encoding="utf-8") == text:
        return 0
    print(f"{file} is not what the code says; run {Path(sys.argv[0]).name}.", file=sys.stderr)
    return 1
