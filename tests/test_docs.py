"""The pages that are generated are what the code says, and no page is named that is not there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("script", ["write_plugin", "write_errors", "write_arguments", "draw"])
def test_a_page_or_picture_is_what_the_code_says(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / f"{script}.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )

    assert done.returncode == 0, done.stderr


def test_every_page_that_is_named_exists() -> None:
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        page
        for source in sources
        for page in re.findall(r"docs/[a-z-]+\.md", source.read_text(encoding="utf-8"))
    }

    assert {page for page in named if not (ROOT / page).exists()} == set()
