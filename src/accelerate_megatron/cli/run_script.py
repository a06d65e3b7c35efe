"""`python -m accelerate_megatron.cli.run_script SCRIPT ...`: a script under the drop-in.

What `launch --drop-in` starts on each rank.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> None:
    """Run a script, or after `--module` a module, as Python itself would, under the drop-in.

    Args:
        argv: `SCRIPT arguments...` or `--module MODULE arguments...`.
    """
    import accelerate_megatron.drop_in  # noqa: F401  # its import is what it is for

    is_module = argv[0] == "--module"
    words = list(argv[1:] if is_module else argv)
    sys.argv = words
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
