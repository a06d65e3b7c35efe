"""How fast a run is and what it takes: operations, the machine's matmul peak, memory."""

from __future__ import annotations

import math
import resource
import time

import torch
import torch.distributed as dist
from transformers import GPT2Config


def flops_per_token(config: GPT2Config) -> float:
    """Return the operations of forward and backward: 6 per weight of a matrix, and attention's."""
    layers, hidden = config.n_layer, config.n_embd
    matrices = 12 * layers * hidden**2 + config.vocab_size * hidden
    causal_attention = layers * hidden * config.n_positions
    return 6.0 * (matrices + causal_attention)


def fast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or fp32 where this machine multiplies faster in it; no communication."""
    seconds = {}
    for each in (dtype, torch.float32):
        a = torch.randn(256, 256).to(each)
        seconds[each] = math.inf
        for _ in range(4):  # the fastest: the first is slow, and others share the machine
            start = time.perf_counter()
            a @ a
            seconds[each] = min(seconds[each], time.perf_counter() - start)
    # Far slower: a CPU without instructions for bf16 takes 30 times as long.
    return torch.float32 if seconds[dtype] > 4 * seconds[torch.float32] else dtype


def matmul_peak(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Return the operations per second of large matmuls, on all ranks at once."""
    dtype, size = fast_dtype(dtype), 1024
    a, b = torch.randn(2, size, size).to(dtype)
    for _ in range(2):
        a @ b
    dist.barrier()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ b
        count += 1
    rate = torch.tensor(2.0 * size**3 * count / (time.perf_counter() - start))
    dist.all_reduce(rate)
    return rate.item()


def peak_memory_gb() -> float:
    """Return the largest resident memory that any rank has had."""
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak.item()
