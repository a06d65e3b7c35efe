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


def matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float = 1.0) -> float:
    """Return the operations per second of large matmuls, on all ranks at once."""
    on_cpu = device.type == "cpu"
    size = 1024 if on_cpu else 8192
    a, b = torch.randn(2, size, size, device=device).to(fast_dtype(dtype) if on_cpu else dtype)
    for _ in range(2):
        a @ b
    dist.barrier()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        (a @ b)[0, 0].item()  # waits for a GPU
        count += 1
    rate = 2.0 * size**3 * count / (time.perf_counter() - start)
    return _over_ranks(rate, dist.ReduceOp.SUM, device)


def peak_memory_gb(device: torch.device) -> float:
    """Return the most memory that any rank has had: resident, or of its GPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        peak = torch.cuda.max_memory_allocated(device)
    return _over_ranks(peak / 1e9, dist.ReduceOp.MAX, device)


def _over_ranks(value: float, op: dist.ReduceOp, device: torch.device) -> float:
    shared = torch.tensor(value, device=device)
    dist.all_reduce(shared, op=op)
    return shared.item()
