"""`python -m accelerate_megatron`: the same as the command `accelerate-megatron`."""

from __future__ import annotations

import sys

from accelerate_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
