"""Generating with a cache, through us and through transformers' `generate`, side by side.

    python benchmarks/generate.py --size small --family llama --batch 1 8 --pairs 3

Both sides hold the same weights in one process, continue the same prompts greedily with as many
threads, and take turns. A streamer notes when each token comes. Prints a JSON line for each turn,
with the median milliseconds per token over each 64 tokens of length, and one per batch size that
sums up: benchmarks/results/generate.jsonl holds the latter, and generation_page.py makes the table
of docs/generation.md of it. The CPU time of the process, all threads together, is less moved by
other jobs on the machine than the time that passes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from accelerate_megatron import Accelerator

SIDES = ("accelerate-megatron", "transformers")
BUCKET = 64


@dataclass(frozen=True)
class Size:
    """A model: GPT-2, a Llama with a quarter of the key/value heads, or a T5 v1.1."""

    hidden_size: int
    layers: int
    heads: int
    vocab_size: int


SIZES = {
    "tiny": Size(64, 2, 4, 512),
    "small": Size(512, 8, 8, 8192),
    "base": Size(768, 12, 12, 50304),
}


class Clock:
    """A streamer that notes the time of each token, and the CPU time of all threads."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._cpu_times: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        self._times.append(time.perf_counter())
        self._cpu_times.append(time.process_time())

    def end(self) -> None:
        pass

    @property
    def seconds(self) -> list[float]:
        """Of each token but the first one, before which the prompt is read."""
        return [after - before for before, after in itertools.pairwise(self._times)][1:]

    @property
    def cpu_seconds(self) -> list[float]:
        """Like `seconds`."""
        return [after - before for before, after in itertools.pairwise(self._cpu_times)][1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time generation on both sides in turn.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="small")
    add("--family", choices=["gpt2", "llama", "t5"], default="gpt2")
    add("--batch", type=int, nargs="+", default=[1, 8], help="prompts")
    add("--prompt", type=int, default=16, help="tokens of a prompt")
    add("--length", type=int, default=512, help="tokens in the end")
    add("--pairs", type=int, default=3, help="turns of each side")
    add("--threads", type=int, default=None)
    return parser.parse_args()


def build_model(size: Size, family: str, length: int) -> Any:
    shared = {"vocab_size": size.vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        sizes = {"n_embd": size.hidden_size, "n_layer": size.layers, "n_head": size.heads}
        return GPT2LMHeadModel(GPT2Config(n_positions=length, **sizes, **shared))
    if family == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                d_model=size.hidden_size,
                d_kv=size.hidden_size // size.heads,
                d_ff=size.hidden_size * 8 // 3,
                num_layers=size.layers,
                num_heads=size.heads,
                feed_forward_proj="gated-gelu",
                decoder_start_token_id=0,
                **shared,
            )
        )
    config = LlamaConfig(
        hidden_size=size.hidden_size,
        intermediate_size=size.hidden_size * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 4,
        max_position_embeddings=length,
        **shared,
    )
    return LlamaForCausalLM(config)


def take_turns(
    sides: dict[str, Any], batch: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Let the sides continue the same prompts in turn, each going first equally often."""
    vocabulary = SIZES[args.size].vocab_size
    prompts = torch.randint(1, vocabulary, (batch, args.prompt))
    before = 1 if args.family == "t5" else args.prompt  # in a row that is continued
    new = args.length - before
    for pair in range(-1, args.pairs):
        for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
            clock = Clock()
            tokens = sides[side](prompts, new, clock)
            if pair < 0:  # warm-up
                continue
            steps = clock.seconds
            yield {
                "benchmark": "generate",
                "side": side,
                "pair": pair,
                "batch": batch,
                "tokens_per_second": batch * len(steps) / sum(steps),
                "cpu_milliseconds_per_token": 1e3 * statistics.mean(clock.cpu_seconds),
                "milliseconds_by_length": by_length(steps, before),
                "cpu_milliseconds_by_length": by_length(clock.cpu_seconds, before),
                "last_tokens": tokens[:, -4:].tolist(),
            }


def by_length(seconds: list[float], before: int) -> dict[str, float]:
    """Return the median milliseconds of a token, by the tokens before the first of each bucket."""
    return {
        str(before + start): 1e3 * statistics.median(seconds[start : start + BUCKET])
        for start in range(0, len(seconds), BUCKET)
    }


def growth(turns: list[dict[str, Any]], times: str) -> float:
    """Return how long our tokens of the last bucket take, in terms of those of the first."""
    ours = [list(turn[times].values()) for turn in turns if turn["side"] == SIDES[0]]
    return statistics.median(buckets[-1] / buckets[0] for buckets in ours)


def summary(turns: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of both sides, and the median of the pairs' ratios."""
    rates = {
        side: [turn["tokens_per_second"] for turn in turns if turn["side"] == side]
        for side in SIDES
    }
    cpu = {
        side: min(turn["cpu_milliseconds_per_token"] for turn in turns if turn["side"] == side)
        for side in SIDES
    }
    ours, theirs = (rates[side] for side in SIDES)
    return {
        "benchmark": "generate",
        "summary": True,
        "size": args.size,
        "family": args.family,
        "batch": turns[0]["batch"],
        "prompt": args.prompt,
        "length": args.length,
        "threads": torch.get_num_threads(),
        "tokens_per_second": {side: statistics.median(rates[side]) for side in SIDES},
        "least_cpu_milliseconds_per_token": cpu,
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "last_to_first_token_time": growth(turns, "milliseconds_by_length"),
        "last_to_first_cpu_time": growth(turns, "cpu_milliseconds_by_length"),
        "same_tokens": len({str(turn["last_tokens"]) for turn in turns}) == 1,
        "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers")},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
    }


def machine() -> str:
    """Return the processor and how many cores of it there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    other = build_model(SIZES[args.size], args.family, args.length).eval()
    other.generation_config.eos_token_id = None  # every turn has all of its tokens
    accelerator = Accelerator(cpu=True)
    ours = accelerator.prepare(other)

    def run_ours(prompts: torch.Tensor, new: int, clock: Clock) -> Any:
        return ours.megatron_generate(prompts, max_new_tokens=new, eos_token_id=[], streamer=clock)

    def run_other(prompts: torch.Tensor, new: int, clock: Clock) -> Any:
        return other.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            streamer=clock,
        )

    sides = dict(zip(SIDES, (run_ours, run_other), strict=True))
    for batch in args.batch:
        turns = []
        for turn in take_turns(sides, batch, args):
            print(json.dumps(turn), flush=True)
            turns.append(turn)
        print(json.dumps(summary(turns, args)), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
