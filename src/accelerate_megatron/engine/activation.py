"""Switch the engine on for one kind of device, once per process and before Megatron-Core."""

from __future__ import annotations

import os
import sys
import warnings

import torch

from accelerate_megatron.config.plugin_fields import TRUE_WORDS
from accelerate_megatron.engine.hook import PACKAGE, RetargetFinder
from accelerate_megatron.engine.patches import Surroundings, When, patches_of
from accelerate_megatron.engine.retarget.expected_hits import EXPECTED_HITS
from accelerate_megatron.engine.versions import check_version, core_folder, read_version
from accelerate_megatron.errors import EngineError
from accelerate_megatron.log import get_logger, log_once

DEVICE_TYPES = ("cpu", "cuda")
_RENAMED_COLLECTIVES = (
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
)


def activate(device_type: str) -> None:
    """Prepare `import megatron.core` for `device_type`, "cpu" or "cuda".

    On "cpu" its modules are rewritten as they are imported (`rules.py`); on both, the
    patches for what is missing without Transformer Engine are applied (`patches/`).
    Calling it again with the same device does nothing.

    Raises:
        ValueError: Another device type.
        EngineError: Megatron-Core is missing or of an unknown version; it was imported
            before in a process that needs it changed; or the engine runs on the other device.
    """
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"device_type is {device_type!r}; it must be one of {DEVICE_TYPES}.")
    active = active_device()
    if active is not None:
        if active != device_type:
            raise EngineError(
                f"This process already runs Megatron-Core on {active!r} and cannot change to "
                f"{device_type!r}: the modules of Megatron-Core are prepared for one device when "
                "they are imported. Decide with Accelerator(cpu=...) or ACCELERATE_USE_CPU before "
                "anything uses the engine, or start another process."
            )
        return
    version = read_version(core_folder())
    check_version(version)
    if str(version) not in EXPECTED_HITS:
        log_once(
            get_logger(__name__),
            f"Megatron-Core {version} is not one of the tested versions "
            f"({', '.join(EXPECTED_HITS)}), but of the same minor version as one: it is used.",
        )
    surroundings = Surroundings.here(device_type, version)
    _check_not_imported_before(surroundings)
    if device_type == "cpu":
        # Megatron-Core warns on every rank, at every start, when it is not set.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # What Megatron-Core calls; torch 2.13 tells every rank at every start that it has new names.
    warnings.filterwarnings("ignore", _RENAMED_COLLECTIVES, FutureWarning)
    sys.meta_path.insert(0, RetargetFinder(surroundings))


def default_device() -> str:
    """Return "cuda" where torch finds it, unless ACCELERATE_USE_CPU asks for the CPU."""
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE_WORDS
    return "cuda" if torch.cuda.is_available() and not wants_cpu else "cpu"


def _surroundings() -> Surroundings | None:
    finders = (finder for finder in sys.meta_path if isinstance(finder, RetargetFinder))
    return next((finder.surroundings for finder in finders), None)


def active_device() -> str | None:
    """Return the device type the engine was activated for, or None."""
    surroundings = _surroundings()
    return None if surroundings is None else surroundings.device_type


def has_transformer_engine() -> bool:
    """Return whether Megatron-Core runs with Transformer Engine here: installed, and on CUDA."""
    surroundings = _surroundings()
    return surroundings is not None and not surroundings.are(When.NO_TRANSFORMER_ENGINE)


def _check_not_imported_before(surroundings: Surroundings) -> None:
    early = sorted(
        name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")
    )
    if surroundings.device_type != "cpu":
        early = [name for name in early if patches_of(name, surroundings)]
    if early:
        raise EngineError(
            f"megatron.core was imported before accelerate_megatron ({len(early)} modules, such "
            f"as {early[0]}), and this process needs it changed while it is imported "
            f"(device {surroundings.device_type!r}, Megatron-Core {surroundings.version}). "
            "Create the Accelerator, or call accelerate_megatron.engine.activate(...), before "
            "the first import of megatron.core."
        )
