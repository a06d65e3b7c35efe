"""A training step of a T5, or of a BERT, on two stages, and with each layer split over two ranks.

    python benchmarks/t5_stages.py --pairs 3
    python benchmarks/t5_stages.py --pairs 3 --model bert

PP2 (a T5's encoder on one stage and its decoder on the other) and TP2 take turns on the same two
ranks and threads, each time in fresh processes, with the same model, batches and micro-batches.
Prints a JSON line for each turn, and last one that sums up: medians, the ratio of each pair as it
is, and with the pipeline's bubble taken out of PP2's time. Of m micro-batches on 2 stages the
bubble is 1 of m + 1 slots.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from accelerate_megatron import Accelerator, MegatronLMPlugin

LAYOUTS = {"pp2": ["--pp_degree", "2"], "tp2": ["--tp_degree", "2"]}
SPLIT = ["--pipeline_model_parallel_split_rank", "1"]
"""What a T5 needs besides at PP2."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a step at PP2 and at TP2 in turn.")
    add = parser.add_argument
    add("--model", choices=("t5", "bert"), default="t5")
    add("--hidden_size", type=int, default=256)
    add("--encoder_layers", type=int, default=6, help="a BERT has no others")
    add("--decoder_layers", type=int, default=4)
    add("--vocab_size", type=int, default=4096)
    add("--encoder_length", type=int, default=256)
    add("--decoder_length", type=int, default=128)
    add("--rows", type=int, default=2, help="of a micro-batch")
    add("--num_micro_batches", type=int, default=8)
    add("--pairs", type=int, default=3, help="turns of each layout")
    add("--warmup", type=int, default=2, help="steps of a turn that do not count")
    add("--steps", type=int, default=5, help="steps of a turn that count")
    add("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_layout(layout: str, model: str) -> dict[str, Any]:
    launch = [sys.executable, "-m", "accelerate_megatron", "launch", "--cpu"]
    launch += ["--num_processes", "2", *LAYOUTS[layout]]
    if (model, layout) == ("t5", "pp2"):
        launch += SPLIT
    job = subprocess.run(
        [*launch, __file__, *sys.argv[1:], "--layout", layout],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(job.stdout.strip().splitlines()[-1])
    return report


def model_and_batch(args: argparse.Namespace) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    rows, heads = args.rows * args.num_micro_batches, args.hidden_size // 32
    batch = {"input_ids": torch.randint(args.vocab_size, (rows, args.encoder_length))}
    if args.model == "bert":
        config = BertConfig(
            vocab_size=args.vocab_size,
            hidden_size=args.hidden_size,
            num_attention_heads=heads,
            intermediate_size=4 * args.hidden_size,
            num_hidden_layers=args.encoder_layers,
            max_position_embeddings=args.encoder_length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForMaskedLM(config), {**batch, "labels": batch["input_ids"]}
    batch["labels"] = torch.randint(args.vocab_size, (rows, args.decoder_length))
    config = T5Config(
        vocab_size=args.vocab_size,
        d_model=args.hidden_size,
        d_kv=32,
        num_heads=heads,
        d_ff=4 * args.hidden_size,
        num_layers=args.encoder_layers,
        num_decoder_layers=args.decoder_layers,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), batch


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps in the launcher's layout; return their seconds. Runs on every rank."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=args.num_micro_batches)
    )
    model, batch = model_and_batch(args)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    seconds, losses = [], []
    for _ in range(args.warmup + args.steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(model(**batch).loss.item())
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {
        "benchmark": "t5_stages",
        "model": args.model,
        "layout": args.layout,
        "threads": torch.get_num_threads(),
        "step_seconds": seconds[args.warmup :],
        "losses": losses,
    }


def sum_up(turns: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return medians, and the ratios PP2 / TP2 of the pairs: below 1, PP2 is faster."""
    medians = {
        layout: [statistics.median(t["step_seconds"]) for t in turns if t["layout"] == layout]
        for layout in LAYOUTS
    }
    ratios = [pp / tp for pp, tp in zip(medians["pp2"], medians["tp2"], strict=True)]
    busy = args.num_micro_batches / (args.num_micro_batches + 1)
    pp, tp = (next(t["losses"] for t in turns if t["layout"] == layout) for layout in LAYOUTS)
    return {
        "benchmark": "t5_stages_summary",
        "settings": {name: value for name, value in vars(args).items() if name != "layout"},
        "median_step_seconds": {name: statistics.median(each) for name, each in medians.items()},
        "ratio_of_each_pair": ratios,
        "ratio_without_bubble": [busy * ratio for ratio in ratios],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(pp, tp, strict=True)),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def main() -> None:
    args = parse_args()
    if args.layout:
        report = measure(args)
        if os.environ["RANK"] == "0":
            print(json.dumps(report), flush=True)
        return
    turns = []
    for pair in range(args.pairs):
        for layout in list(LAYOUTS) if pair % 2 == 0 else list(LAYOUTS)[::-1]:
            turns.append(run_layout(layout, args.model))
            print(json.dumps({"pair": pair, **turns[-1]}), flush=True)
    print(json.dumps(sum_up(turns, args)), flush=True)


if __name__ == "__main__":
    main()
