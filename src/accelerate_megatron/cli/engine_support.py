"""What the engine does with the Megatron-Core and the devices of this machine, for `env`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

_CUDA = "needs a CUDA device, and torch's build for CUDA"
_TRANSFORMER_ENGINE = "pip install 'transformer-engine[pytorch]', on CUDA"


def engine_support(megatron: Mapping[str, Any], cuda_devices: int) -> list[dict[str, Any]]:
    """Return the abilities, each as "what", "here" (a bool) and "how" to get it (empty if here).

    Args:
        megatron: What `env` found of Megatron-Core: "usable", and "problem" if it is not.
        cuda_devices: How many CUDA devices torch sees.
    """
    usable, problem = bool(megatron["usable"]), str(megatron.get("problem", ""))
    on_cuda = usable and cuda_devices > 0
    has_te = importlib.util.find_spec("transformer_engine") is not None
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    rows = [
        ("training on CPU ranks, over gloo", usable, problem),
        ("training on CUDA, over NCCL", on_cuda, problem or _CUDA),
        ("tensor, pipeline, sequence, data, context, expert parallelism", usable, problem),
        ("fp32, bf16, fp16", usable, problem),
        ("distributed optimizer, FSDP2, optimizer in host memory", usable, problem),
        ("overlap_cpu_optimizer_d2h_h2d", on_cuda, problem or _CUDA),
        ("use_precision_aware_optimizer", on_cuda and has_te, problem or _TRANSFORMER_ENGINE),
        ("event files of tensorboard_dir", has_tensorboard, "pip install tensorboard"),
        ("FP8", False, "not in this package; see Megatron-Bridge"),
    ]
    return [{"what": what, "here": here, "how": "" if here else how} for what, here, how in rows]


def support_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table as text, one indented line for each ability."""
    return [f"  {row['what']:<64} {'yes' if row['here'] else 'no: ' + row['how']}" for row in rows]
