"""`accelerate-megatron env`: what a bug report needs to say about a machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_megatron import __version__
from accelerate_megatron.cli.engine_support import engine_support, support_lines
from accelerate_megatron.cli.machine import count_cores, count_cuda_devices, torch_cuda_version
from accelerate_megatron.errors import EngineError

PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "safetensors", "numpy")

# Used when they are there; nothing needs them. The import name, since Apex has no package.
_OPTIONAL = ("transformer_engine", "apex", "triton")

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION",
)


def main(argv: Sequence[str]) -> int:
    """Print the facts and return 0, or 1 when Megatron-Core cannot be used as installed.

    Args:
        argv: The words after `env`.
    """
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron env",
        description="Show versions, devices, cores and threads.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--retarget",
        action="store_true",
        help="show instead what is rewritten in Megatron-Core without CUDA, and what is patched",
    )
    args = parser.parse_args(argv)
    if args.retarget:
        from accelerate_megatron.cli.retarget import retarget_json, retarget_text

        print(retarget_json() if args.json else retarget_text())
        return 0
    facts = find_facts()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts)))
    return 0 if facts["megatron-core"]["usable"] else 1


def find_facts() -> dict[str, Any]:
    """Return what there is: versions, devices, threads, variables, and what the engine can do."""
    megatron = _megatron_core()
    devices = count_cuda_devices()
    return {
        "accelerate-megatron": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "megatron-core": megatron,
        **{name: _installed_version(name) for name in PACKAGES},
        "optional": {name: importlib.util.find_spec(name) is not None for name in _OPTIONAL},
        "cuda": {"torch built for": torch_cuda_version(), "devices": devices},
        "cores": count_cores(),
        "threads of torch": _torch_threads(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "engine support": engine_support(megatron, devices),
    }


def _megatron_core() -> dict[str, Any]:
    from accelerate_megatron.engine.versions import (
        SUPPORTED_RANGE,
        check_version,
        core_folder,
        read_version,
    )

    facts: dict[str, Any] = {"version": None, "supported": SUPPORTED_RANGE, "usable": False}
    try:
        version = read_version(core_folder())
        facts["version"] = str(version)
        check_version(version)
    except EngineError as error:
        return {**facts, "problem": str(error)}
    return {**facts, "usable": True}


def _torch_threads() -> int | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.get_num_threads()


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, list):
            lines += [name, *support_lines(value)]
            continue
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {_word(item)}" for key, item in value.items()) or "-"
        lines.append(f"{name:<20} {_word(value)}")
    return lines


def _word(value: object) -> str:
    words = {True: "yes", False: "no", None: "none"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
