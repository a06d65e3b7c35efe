"""How long pipeline stages wait, with stages of equal time: measured, against the formula.

    python benchmarks/bubble.py [--json] [--output FILE] [--steps 3] [--forward_seconds 0.1]

Each stage sleeps in its forward and twice as long in its backward pass (a stage of v chunks, a v-th
of it in each), around a model so small that its own work hardly counts. The bubble is what is left
of a step besides a stage's sleeps; the fastest of the steps counts, since other work on the
machine only makes steps longer. Exits with 1 when it is not within 10% of
(p - 1) / (v m + p - 1), for p stages, m micro-batches and v chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import TinyModel

from accelerate_megatron import Accelerator, MegatronLMPlugin
from accelerate_megatron.planning.bubble import bubble_share

LIMIT = 0.10
BACKWARD = 2.0
"""What a backward pass takes, in forward passes."""


@dataclass(frozen=True)
class Pipeline:
    """The size of a pipeline."""

    stages: int
    micro_batches: int
    chunks: int = 1
    """Chunks on each stage."""

    @property
    def name(self) -> str:
        interleaved = f" VP{self.chunks}" if self.chunks > 1 else ""
        return f"PP{self.stages}{interleaved}, {self.micro_batches} micro-batches"

    @property
    def expected(self) -> float:
        return bubble_share(self.stages, self.micro_batches, self.chunks)


PIPELINES = [
    Pipeline(2, 2),
    Pipeline(2, 8),
    Pipeline(4, 4),
    Pipeline(4, 8),
    Pipeline(2, 4, chunks=2),
    Pipeline(2, 8, chunks=2),
    Pipeline(4, 4, chunks=2),
    Pipeline(4, 8, chunks=2),
]


class _Sleep(torch.autograd.Function):
    """Sleeps in the backward pass; `tensor` goes through."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        # No view: Megatron frees the memory of what it has sent to the next stage.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


def step_seconds(pipeline: Pipeline, forward_seconds: float, steps: int) -> list[float]:
    """Return what each step takes until the last rank is done; every rank calls it."""
    plugin: dict[str, Any] = {"pp_degree": pipeline.stages}
    if pipeline.chunks > 1:
        plugin["num_layers_per_virtual_pipeline_stage"] = 1
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=pipeline.micro_batches, **plugin),
    )
    layers = pipeline.stages * pipeline.chunks
    changes = {"n_layer": layers, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 32}
    hf_model = TinyModel("gpt2", tied=False, changes=changes).build()
    model, _ = accelerator.prepare(hf_model, torch.optim.SGD(hf_model.parameters(), lr=1e-3))
    of_chunk = forward_seconds / pipeline.chunks

    def sleep(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        time.sleep(of_chunk)
        return _Sleep.apply(output, BACKWARD * of_chunk)  # type: ignore[no-any-return]

    for chunk in model.session.chunks:
        chunk.module.register_forward_hook(sleep)
    ids = torch.zeros(pipeline.micro_batches, 8, dtype=torch.long)
    model.train()
    model(input_ids=ids, labels=ids)
    seconds = []
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        model(input_ids=ids, labels=ids)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(pipeline: Pipeline, forward_seconds: float, steps: int) -> dict[str, Any]:
    """Return the measured bubble beside the one of the formula."""
    ranks = run_ranks(
        step_seconds, pipeline, forward_seconds, steps, num_ranks=pipeline.stages, timeout=300.0
    )
    seconds = [max(of_step) for of_step in zip(*ranks, strict=True)]
    busy = pipeline.micro_batches * forward_seconds * (1 + BACKWARD)
    measured = 1 - busy / min(seconds)
    return {
        "benchmark": "bubble",
        **asdict(pipeline),
        "forward_seconds": forward_seconds,
        "step_seconds": [round(value, 4) for value in seconds],
        "measured": round(measured, 4),
        "expected": round(pipeline.expected, 4),
        "agrees": abs(measured / pipeline.expected - 1) <= LIMIT,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", action="store_true", help="print a JSON line for each pipeline")
    add("--output", type=Path, help="a file for the JSON lines, too")
    add("--steps", type=int, default=3)
    add("--forward_seconds", type=float, default=0.1, help="of a stage's forward pass")
    args = parser.parse_args()
    agrees = True
    with open(args.output or os.devnull, "w", encoding="utf-8") as output:
        for pipeline in PIPELINES:
            record = measure(pipeline, args.forward_seconds, args.steps)
            agrees = agrees and record["agrees"]
            print(json.dumps(record), file=output, flush=True)
            text = (
                f"{pipeline.name:28} {record['measured']:.3f} of the step, formula "
                f"{record['expected']:.3f}{'' if record['agrees'] else '  DISAGREES'}"
            )
            print(json.dumps(record) if args.json else text, flush=True)
    return int(not agrees)


if __name__ == "__main__":
    # Under a name by which the ranks can read what is sent to them.
    from benchmarks import bubble

    sys.exit(bubble.main())
