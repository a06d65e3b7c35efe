"""Scripts written for Accelerate, unchanged: its names for Megatron-LM mean this package's.

`import accelerate_megatron.drop_in` does it, before the script's own imports; so does
`accelerate-megatron launch --drop-in script.py`. That this import has an effect is its purpose.
`deactivate()` undoes it, `active()` is a context manager.

Replaced are attributes of Accelerate's modules, so what was imported from them before keeps its
old meaning. `DistributedType.TPU`, which Accelerate has since renamed, is there for old scripts.
The steps of Accelerate's own `prepare` are refused when they are used, by name.

`Accelerator` is `DropInAccelerator` here: after `load_state` an interrupted epoch starts again in
the same order, because scripts written for Accelerate skip the batches that were used themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from accelerate.data_loader import skip_first_batches as _upstream_skip
from accelerate.utils import DistributedType

import accelerate_megatron
from accelerate_megatron.data.loader import MegatronDataLoader
from accelerate_megatron.errors import UnsupportedError


class DropInAccelerator(accelerate_megatron.Accelerator):
    """`Accelerator` for scripts that resume as Accelerate's documentation says.

    They go through the interrupted epoch from its start, leaving out the batches that were used,
    or call `skip_first_batches`.
    """

    _goes_on_in_mid_epoch = False

    def __init__(self, *args: Any, logging_dir: str | None = None, **kwargs: Any) -> None:
        """Take Accelerate's arguments, and `logging_dir`, which it once had for `project_dir`."""
        if logging_dir is not None:
            kwargs.setdefault("project_dir", logging_dir)
        super().__init__(*args, **kwargs)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a prepared loader that begins later; any other as Accelerate's function does.

    That one would make a plain DataLoader of a prepared one: the whole data on every rank.
    """
    if isinstance(dataloader, MegatronDataLoader):
        dataloader.skip_to(num_batches)
        return dataloader
    return _upstream_skip(dataloader, num_batches)


_MODULES = (
    "accelerate",
    "accelerate.accelerator",
    "accelerate.data_loader",
    "accelerate.utils",
    "accelerate.utils.dataclasses",
    "accelerate.utils.megatron_lm",
)
"""Where a script may import the names from; each is replaced in those that have it."""

_ENGINE_PARTS = {
    "MegatronEngine": ("accelerate_megatron.training.model", "MegatronModel"),
    "MegatronLMOptimizerWrapper": ("accelerate_megatron.training.optimizer", "PreparedOptimizer"),
    "MegatronLMSchedulerWrapper": ("accelerate_megatron.training.scheduler", "PreparedScheduler"),
}
"""Accelerate's classes of what `prepare` returns -> ours: for isinstance in scripts."""

_STEPS_OF_PREPARE = {
    "megatron_lm_initialize": "initialize",
    "megatron_lm_prepare_data_loader": "prepare_data_loader",
    "megatron_lm_prepare_model_optimizer_scheduler": "prepare_model_optimizer_scheduler",
    "megatron_lm_prepare_optimizer": "prepare_optimizer",
    "megatron_lm_prepare_scheduler": "prepare_scheduler",
}
"""Exported by Accelerate, the steps of its own `prepare`; and their names in `megatron_lm`."""

_UTILS_ONLY = (*_ENGINE_PARTS, "gather_across_data_parallel_groups", *_STEPS_OF_PREPARE)
"""What `accelerate.utils` exports only where upstream Megatron-LM is installed."""

_OLD_NAMES = {"TPU": "XLA"}
"""Members of `DistributedType` that Accelerate once had, which older scripts ask for."""

_ABSENT = object()
_replaced: dict[tuple[str, str], Any] = {}


def activate() -> None:
    """Let Accelerate's names mean ours; without effect when they do already."""
    if _replaced:
        return
    for name, value in replacements().items():
        for module_name in _MODULES:
            module = importlib.import_module(module_name)
            is_missing_export = module_name == "accelerate.utils" and name in _UTILS_ONLY
            if hasattr(module, name) or is_missing_export:
                _replaced[module_name, name] = getattr(module, name, _ABSENT)
                setattr(module, name, value)
    for old, new in _OLD_NAMES.items():
        if not hasattr(DistributedType, old):
            setattr(DistributedType, old, DistributedType[new])


def deactivate() -> None:
    """Give Accelerate's names their own meaning back; without effect when they have it."""
    for (module_name, name), value in _replaced.items():
        module = importlib.import_module(module_name)
        if value is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, value)
    for old in _OLD_NAMES:
        if old in vars(DistributedType):
            delattr(DistributedType, old)
    _replaced.clear()


@contextmanager
def active() -> Iterator[None]:
    """Let Accelerate's names mean ours inside the block."""
    was_active = bool(_replaced)
    activate()
    try:
        yield
    finally:
        if not was_active:
            deactivate()


def replacements() -> dict[str, Any]:
    """Return every replaced name of Accelerate's and what it means here."""
    ours: dict[str, Any] = {
        name: getattr(accelerate_megatron, name)
        for name in accelerate_megatron.__all__
        if name != "__version__"
    }
    ours |= {"Accelerator": DropInAccelerator, "skip_first_batches": skip_first_batches}
    for name, (module, attribute) in _ENGINE_PARTS.items():
        ours[name] = getattr(importlib.import_module(module), attribute)
    for name, short_name in _STEPS_OF_PREPARE.items():
        refused = _refused_function(name)
        ours |= {name: refused, short_name: refused}
    return ours


def _refused_function(name: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{name} is a step of Accelerate's own prepare, which is another one here. Call "
            "accelerator.prepare(model, optimizer, loader, scheduler)."
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


activate()
