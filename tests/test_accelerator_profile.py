"""`accelerator.profile` sees an update on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.utils import ProfileKwargs

from accelerate_megatron import Accelerator, MegatronLMPlugin
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import pad_samples, ragged_samples
from tests.training.start import SGD, TWO_LAYERS


def profiled(folder: str) -> list[str]:
    """Return the names of what the profiler saw during one update."""
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=MegatronLMPlugin(tp_degree=2),
        kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)],
    )
    hf_model = TWO_LAYERS.build()
    model, _ = accelerator.prepare(hf_model, SGD.build(hf_model))
    with accelerator.profile() as profiler:
        model(**pad_samples(ragged_samples(4)))
    accelerator.wait_for_everyone()
    return [event.key for event in profiler.key_averages()]


@pytest.mark.filterwarnings("ignore")  # of torch's profiler
def test_the_profile_of_an_update_has_its_matrix_products_and_collectives(tmp_path: Path) -> None:
    for names in run_ranks(profiled, str(tmp_path), num_ranks=2):
        assert any("mm" in name for name in names)
        assert any("all_reduce" in name.lower() or "allreduce" in name for name in names)
        assert any("backward" in name.lower() for name in names)

    traces = sorted(tmp_path.iterdir())
    assert len(traces) == 2, "one trace for each rank"
    assert all(json.loads(path.read_text())["traceEvents"] for path in traces)
