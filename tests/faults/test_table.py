"""The tests that docs/faults.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"`(?P<file>tests/[\w/]+\.py)?::(?P<test>test_\w+)`")


def test_every_test_that_the_table_names_is_there() -> None:
    file, missing, found = "", [], 0
    for match in _NAME.finditer((REPOSITORY / "docs/faults.md").read_text()):
        file = match["file"] or file
        found += 1
        if f"def {match['test']}(" not in (REPOSITORY / file).read_text():
            missing.append(f"{file}::{match['test']}")

    assert missing == []
    assert found > 40
