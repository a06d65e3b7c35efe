"""One training step through us and through transformers + accelerate, side by side.

    python benchmarks/train_step.py --size small --dtype bf16 --ranks 2 --tp_degree 2 --pairs 3

Both sides train the same model from the same weights on the same batches with AdamW, on equally
many ranks with equally many threads; the other side's ranks are data-parallel. They take turns,
each time in fresh processes, since Accelerate's state is one per process. Prints a JSON line with
the raw step times for each turn, and last one that sums up. Precision differs where it is bf16:
here bf16 weights with fp32 main copies, there autocast over fp32 weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

SIDES = ("accelerate-megatron", "accelerate")


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its batch."""

    hidden_size: int
    layers: int
    heads: int
    vocab_size: int
    seq_length: int
    global_batch_size: int


SIZES = {
    "tiny": Size(64, 2, 4, 512, 64, 8),
    "small": Size(512, 8, 8, 8192, 512, 8),
    "base": Size(768, 12, 12, 50304, 512, 4),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a training step on both sides in turn.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="small")
    add("--dtype", choices=["fp32", "bf16"], default="bf16")
    add("--ranks", type=int, default=1)
    add("--threads", type=int, default=None, help="per rank (cores / ranks)")
    add("--tp_degree", type=int, default=1)
    add("--pp_degree", type=int, default=1)
    add("--num_micro_batches", type=int, default=1)
    add("--pairs", type=int, default=3, help="turns of each side")
    add("--warmup", type=int, default=2, help="steps of a turn that do not count")
    add("--steps", type=int, default=5, help="steps of a turn that count")
    add("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def take_turns(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start both sides in turn, each going first equally often; yield what each reports."""
    for pair in range(args.pairs):
        sides = SIDES if pair % 2 == 0 else SIDES[::-1]
        for side in sides:
            yield {"benchmark": "train_step", "pair": pair, "side": side, **run_side(side, args)}


def run_side(side: str, args: argparse.Namespace) -> dict[str, Any]:
    launch = [sys.executable, "-m", "accelerate_megatron", "launch", "--cpu"]
    launch += ["--num_processes", str(args.ranks)]
    if args.threads:
        launch += ["--threads", str(args.threads)]
    if args.dtype == "bf16":
        launch += ["--mixed_precision", "bf16"]
    if side == "accelerate-megatron":
        launch += ["--tp_degree", str(args.tp_degree), "--pp_degree", str(args.pp_degree)]
    job = subprocess.run(
        [*launch, __file__, *sys.argv[1:], "--side", side],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(job.stdout.strip().splitlines()[-1])
    return report


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps on this side; return their seconds. Runs on every rank."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    size = SIZES[args.size]
    torch.manual_seed(0)
    accelerator, replicas, scheduler_of = start_side(args)
    rows = torch.randint(size.vocab_size, (size.global_batch_size, size.seq_length))
    samples = [{"input_ids": row, "labels": row} for row in rows] * (args.warmup + args.steps)
    micro_batches = args.num_micro_batches if args.side == "accelerate-megatron" else 1
    batch_size = size.global_batch_size // (replicas * micro_batches)
    model = build_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parts = [model, optimizer, DataLoader(samples, batch_size=batch_size)]
    if scheduler_of is not None:
        parts.append(scheduler_of(optimizer))
    model, optimizer, loader, *_ = accelerator.prepare(*parts)
    model.train()

    seconds, losses = [], []
    batches = iter(loader)
    for _ in range(args.warmup + args.steps):
        barrier(dist)
        start = time.perf_counter()
        loss = model(**next(batches)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        barrier(dist)
        seconds.append(time.perf_counter() - start)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
    return {
        "size": {"name": args.size, **asdict(size)},
        "dtype": args.dtype,
        "ranks": args.ranks,
        "threads": torch.get_num_threads(),
        "layout": {"tp": args.tp_degree, "pp": args.pp_degree, "micro": micro_batches},
        "warmup_seconds": seconds[: args.warmup],
        "step_seconds": seconds[args.warmup :],
        "losses": losses,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "megatron-core", "accelerate")},
        },
    }


def start_side(args: argparse.Namespace) -> tuple[Any, int, Any]:
    """Return the side's Accelerator, its data-parallel replicas, and its stand-in scheduler."""
    if args.side == "accelerate":
        import accelerate

        return accelerate.Accelerator(), args.ranks, None
    from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin

    plugin = MegatronLMPlugin(
        num_micro_batches=args.num_micro_batches,
        train_iters=args.warmup + args.steps,
        lr_decay_style="constant",
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    return accelerator, args.ranks // (args.tp_degree * args.pp_degree), MegatronLMDummyScheduler


def build_model(size: Size) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.vocab_size,
            n_positions=size.seq_length,
            n_embd=size.hidden_size,
            n_layer=size.layers,
            n_head=size.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def barrier(dist: Any) -> None:
    if dist.is_initialized():
        dist.barrier()


def sum_up(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of both sides and the ratio of each pair: above 1, ours is faster."""
    medians = {
        side: [statistics.median(t["step_seconds"]) for t in turns if t["side"] == side]
        for side in SIDES
    }
    ours, other = (medians[side] for side in SIDES)
    last = {key: turns[-1][key] for key in ("dtype", "ranks", "threads", "versions")}
    return {
        "benchmark": "train_step_summary",
        "size": turns[-1]["size"]["name"],
        **last,
        "layout": next(t["layout"] for t in turns if t["side"] == SIDES[0]),
        "median_step_seconds": {side: statistics.median(medians[side]) for side in SIDES},
        "speedup_of_each_pair": [b / a for a, b in zip(ours, other, strict=True)],
        "peak_rss_gb": {
            side: max(t["peak_rss_gb"] for t in turns if t["side"] == side) for side in SIDES
        },
        "largest_loss_difference": largest_loss_difference(turns),
    }


def largest_loss_difference(turns: list[dict[str, Any]]) -> float:
    """Return how far the losses of the two sides are apart: they train the same thing."""
    ours, other = (next(t["losses"] for t in turns if t["side"] == side) for side in SIDES)
    return max(abs(a - b) for a, b in zip(ours, other, strict=True))


def main() -> None:
    args = parse_args()
    if args.side:
        report = measure(args)
        if os.environ["RANK"] == "0":
            print(json.dumps(report), flush=True)
        return
    turns = []
    for turn in take_turns(args):
        print(json.dumps(turn), flush=True)
        turns.append(turn)
    print(json.dumps(sum_up(turns)), flush=True)


if __name__ == "__main__":
    main()
