from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_page_of_families_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "docs" / "write_families.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
