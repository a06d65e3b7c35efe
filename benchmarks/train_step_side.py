"""One side of benchmarks/train_step.py, on each of its ranks; prints its report on rank 0.

Started by that benchmark with a JSON object, which says what to do.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

BEFORE_IMPORTS = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

SIZES = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "vocabulary": 512, "seq": 64, "batch": 8},
    "S": {"hidden": 512, "layers": 8, "heads": 8, "vocabulary": 8192, "seq": 512, "batch": 8},
    "B": {"hidden": 768, "layers": 12, "heads": 12, "vocabulary": 50304, "seq": 512, "batch": 4},
}
OURS = ("ours", "one-process")


def main() -> None:
    job = json.loads(sys.argv[1])
    if "matmul_precision" in job["options"]:
        torch.set_float32_matmul_precision(job["options"]["matmul_precision"])
    report = matmul_limit(job) if job["side"] == "limit" else train(job)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def matmul_limit(job: dict[str, Any]) -> dict[str, float]:
    """Return what large products of the case's dtype reach with all threads, by the faster library.

    torch multiplies fp32 matrices by MKL; oneDNN, which is in torch too, is faster on some CPUs.
    """
    dtype, size = _dtype(job), 2048
    a, b = torch.randn(2, size, size).to(dtype)
    products = [lambda: a @ b]
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        products.append(
            lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")  # a b^T
        )
    seconds = []
    for product in products:
        turns = []
        for _ in range(12):
            start = time.perf_counter()
            product()
            turns.append(time.perf_counter() - start)
        seconds.append(statistics.median(turns[2:]))
    return {"gflops": 2 * size**3 / min(seconds) / 1e9}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps on this side and return what they took. Every rank of it calls it."""
    size = SIZES[job["size"]]
    accelerator, scheduler = _ours(job) if job["side"] in OURS else _theirs(job)
    import_seconds = time.time() - BEFORE_IMPORTS
    torch.manual_seed(0)
    rows = torch.randint(size["vocabulary"], (size["batch"], size["seq"]))
    model = build_model(job["family"], size, job["options"].get("attention", "sdpa"))
    flops = step_flops(model, size)
    if job["side"] in ("hf-same-settings", "hf-compile"):
        model = model.to(_dtype(job))
    fused = {"fused": True} if job["options"].get("fused_adamw") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
    samples = [{"input_ids": row, "labels": row} for row in rows] * (job["warmup"] + job["steps"])
    replicas = job["ranks"] // (job["tp"] * job["pp"])
    rows_at_once = size["batch"] // (replicas * (job["micro_batches"] if scheduler else 1))
    loader = DataLoader(samples, batch_size=rows_at_once)
    if job["side"] == "hf-compile":
        model = torch.compile(model)
    parts = [model, optimizer, loader] + ([scheduler(optimizer)] if scheduler else [])
    model, optimizer, loader, *_ = accelerator.prepare(*parts)
    model.train()
    seconds, losses, first = [], [], 0.0
    batches = iter(loader)
    for step in range(job["warmup"] + job["steps"]):
        _barrier()
        start = time.perf_counter()
        loss = model(**next(batches)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _barrier()
        seconds.append(time.perf_counter() - start)
        if step == 0:
            first = time.time() - job["started"]
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {
        "step_s": seconds[job["warmup"] :],
        "first_step_s": first,
        "import_s": import_seconds,
        "losses": losses,
        "flops": flops,
        "threads": torch.get_num_threads(),
        "parameters": str(next(model.parameters()).dtype).removeprefix("torch."),
        "peak_rss_gb": _largest_rss_gb(),
        "versions": {
            "python": platform.python_version(),
            **{
                name: version(name)
                for name in ("torch", "megatron-core", "accelerate", "transformers")
            },
        },
    }


def _ours(job: dict[str, Any]) -> tuple[Any, Any]:
    from accelerate_megatron import Accelerator, MegatronLMDummyScheduler, MegatronLMPlugin

    plugin = MegatronLMPlugin(
        tp_degree=job["tp"],
        pp_degree=job["pp"],
        sequence_parallelism=job["sp"],
        num_micro_batches=job["micro_batches"],
        train_iters=job["warmup"] + job["steps"],
        lr_decay_style="constant",
    )
    precision = "bf16" if job["dtype"] == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=precision, megatron_lm_plugin=plugin)
    return accelerator, MegatronLMDummyScheduler


def _theirs(job: dict[str, Any]) -> tuple[Any, None]:
    import accelerate

    uses_autocast = job["side"] == "hf-as-run" and job["dtype"] == "bf16"
    return accelerate.Accelerator(mixed_precision="bf16" if uses_autocast else "no"), None


def build_model(family: str, size: dict[str, int], attention: str) -> PreTrainedModel:
    """Return the model, the same weights on every side."""
    torch.manual_seed(1)
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=size["vocabulary"],
                n_positions=size["seq"],
                n_embd=size["hidden"],
                n_layer=size["layers"],
                n_head=size["heads"],
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
                bos_token_id=0,
                eos_token_id=0,
                attn_implementation=attention,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size["vocabulary"],
            max_position_embeddings=size["seq"],
            hidden_size=size["hidden"],
            num_hidden_layers=size["layers"],
            num_attention_heads=size["heads"],
            num_key_value_heads=size["heads"],
            # Three matrices of 8/3 h instead of two of 4 h, rounded up to a multiple of 64.
            intermediate_size=-(-size["hidden"] * 8 // (3 * 64)) * 64,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation=attention,
        )
    )


def step_flops(model: PreTrainedModel, size: dict[str, int]) -> float:
    """Return the operations of a step: 6 per weight of a matrix, and causal attention's."""
    tables = {id(model.get_input_embeddings().weight)}
    if hasattr(model.base_model, "wpe"):
        tables.add(id(model.base_model.wpe.weight))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        matrices += model.get_output_embeddings().weight.numel()
    attention = size["layers"] * size["hidden"] * size["seq"]
    return 6.0 * (matrices + attention) * size["batch"] * size["seq"]


def _dtype(job: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if job["dtype"] == "bf16" else torch.float32


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _largest_rss_gb() -> float:
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
    if dist.is_initialized():
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak.item()


if __name__ == "__main__":
    main()
