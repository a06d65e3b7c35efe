"""A script that saves in the background and ends at once. Run by a launcher.

python -m tests.checkpoint.ending FOLDER good|bad
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.checkpoint.training import Run, make
from tests.parity.training import LayoutCase

accelerator, model, _, loader, _ = make(
    Run(
        LayoutCase(2),
        plugin={"other_megatron_args": {"async_save": True}},
        project=sys.argv[1],
    )
)
model.train()
model(**next(iter(loader)))

from accelerate_megatron.checkpoint import saving  # noqa: E402

real = saving.write_capture


def write_late(*args: Any) -> Any:
    time.sleep(2)
    if sys.argv[2] == "bad":
        raise OSError(5, "Input/output error")
    return real(*args)


saving.write_capture = write_late
accelerator.save_state()
