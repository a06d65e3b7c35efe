"""What a manifest says of the run, for people and for comparing."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("accelerate-megatron", "megatron-core", "torch", "accelerate", "transformers")


def describe_run(run: Any, num_ranks: int) -> dict[str, Any]:
    """Return the run's layout, model, precision and versions, as JSON can hold them."""
    return {
        "layout": _layout_of(run),
        "model": {
            name: value
            for name, value in asdict(run.shape).items()
            if isinstance(value, (bool, int, float, str)) or value is None
        },
        "precision": run.precision,
        "num_ranks": num_ranks,
        "num_micro_batches": run.num_micro_batches,
        "micro_batch_size": run.micro_batch_size,
        "use_distributed_optimizer": run.use_distributed_optimizer,
        "optimizer": None if run.optimizer is None else run.optimizer.kind,
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def has_same_ranks(saved: dict[str, Any], run: Any) -> bool:
    """Return whether every rank stands where it stood in the run that was saved."""
    return bool(saved.get("layout") == _layout_of(run))


def _layout_of(run: Any) -> dict[str, Any]:
    return {**asdict(run.layout), "dp_size": run.layout.dp_size}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
