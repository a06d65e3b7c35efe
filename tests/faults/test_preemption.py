"""SIGTERM, and the processes that a script forks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

from accelerate_megatron import Accelerator
from accelerate_megatron.faults.preemption import Preemption
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS


def _terminate_a_forked_process() -> tuple[int, bool]:
    """Return how a forked process ends, and whether this one would save and end now."""
    preemption = Preemption(accelerator=None)
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), preemption._is_asked


def _handlers(folder: str) -> list[Any]:
    """Return SIGTERM's handler after the model is prepared, and after a DataLoader is, too."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = TWO_LAYERS.build()
    accelerator.prepare(model, SGD.build(model))
    without_loader = signal.getsignal(signal.SIGTERM)
    accelerator.prepare(DataLoader(ragged_samples(2), collate_fn=pad_samples))
    return [without_loader, signal.getsignal(signal.SIGTERM).__qualname__]


def test_sigterm_is_left_alone_until_there_is_a_loader_that_acts_on_it(tmp_path: Path) -> None:
    [[without_loader, with_loader]] = run_ranks(_handlers, str(tmp_path), num_ranks=1)

    assert without_loader == signal.SIG_DFL
    assert with_loader == "Preemption._note"


def test_sigterm_ends_a_process_that_the_script_has_forked() -> None:
    """As multiprocessing ends the workers of a pool, and waits until they are gone."""
    ended = run_ranks(_terminate_a_forked_process, num_ranks=1, process_group=False, timeout=60)

    assert ended == [(-signal.SIGTERM, False)]
