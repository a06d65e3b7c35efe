"""Entering Accelerate's shared state as Megatron-LM, which Accelerate itself does on GPUs only."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, ProfileKwargs
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from accelerate_megatron.config.plugin_fields import parse_bool
from accelerate_megatron.errors import ConfigurationError, RendezvousError, UnsupportedError
from accelerate_megatron.log import get_logger, log_once
from accelerate_megatron.plugin import MegatronLMPlugin

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = get_logger(__name__)

USE_UPSTREAM = "ACCELERATE_USE_MEGATRON_LM"
"""With this variable set, Accelerate looks for modules that megatron-core wheels lack."""

LEAVING_SECONDS = 10.0
"""How long a process that ends waits for the threads of its process group."""

_leaving: set[int] = set()
"""Processes that will leave their group when they end."""

OTHER_STRATEGIES = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "torch_tp_plugin",
    "parallelism_config",
    "dynamo_backend",
    "dynamo_plugin",
)


def wants_cpu(cpu: bool) -> bool:
    """Return whether to compute on the CPU: asked for, or there is nothing else."""
    word = os.environ.get("ACCELERATE_USE_CPU", "false")
    return cpu or parse_bool(word, "ACCELERATE_USE_CPU") or not torch.cuda.is_available()


@contextmanager
def without_upstream_megatron() -> Iterator[None]:
    """Hide `USE_UPSTREAM` while Accelerate's own constructor runs."""
    word = os.environ.pop(USE_UPSTREAM, None)
    try:
        yield
    finally:
        if word is not None:
            os.environ[USE_UPSTREAM] = word


@contextmanager
def rendezvous_advice() -> Iterator[None]:
    """Say what to look at when the ranks do not meet while the block starts a process group.

    Raises:
        RendezvousError: The address cannot be reached, or a rank did not come in time.
    """
    try:
        yield
    except (dist.DistError, TimeoutError) as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        rank, size = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RendezvousError(
            f"Rank {rank} did not meet all {size} ranks at {place} ({reason}). Look whether "
            f"{size} ranks were started, whether rank 0 runs at that address and its port is open "
            "to the others. InitProcessGroupKwargs(timeout=...) says how long ranks are waited for."
        ) from error


@dataclass(frozen=True)
class MeetingPlace:
    """Where the ranks of a job meet before they have a process group."""

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    """How long one waits for the others."""
    is_restart: bool
    """Whether torchrun has started these ranks again."""


def meeting_place(kwargs_handlers: Iterable[Any] | None) -> MeetingPlace | None:
    """Return the store that the launcher's environment names, in which nothing is old.

    torchrun keeps its store from one attempt to the next, with the addresses of the last one's
    ranks, which are gone (torch 2.13: "Connection refused"): each attempt gets a part of its own.

    Args:
        kwargs_handlers: Those of `Accelerator`; an InitProcessGroupKwargs has the timeout.

    Returns:
        None for one rank alone, for ranks that have a group, and for those that meet elsewhere.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone or dist.is_initialized() or not {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        return None
    timeout = default_pg_timeout
    for handler in kwargs_handlers or ():
        if isinstance(handler, InitProcessGroupKwargs):
            if handler.init_method not in (None, "env://"):
                return None
            timeout = handler.timeout or timeout
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own_part = PrefixStore(f"attempt-{attempt}", store)
    return MeetingPlace(own_part, rank, world_size, timeout, is_restart=attempt != "0")


def start_restarted_group(device_type: str, place: MeetingPlace | None) -> None:
    """Start the process group of ranks that torchrun has started again, in their own store.

    Args:
        device_type: "cpu" or "cuda".
        place: Where they meet.
    """
    if place is None or not place.is_restart:
        return
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "nccl",
        store=place.store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=place.timeout,
    )


def start_process_group(device: torch.device) -> None:
    """Give one rank alone a process group too, which Megatron needs; see to its end at exit."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if os.getpid() not in _leaving:
        # Once: what is registered later, such as waiting for a save, comes before it at the end.
        _leaving.add(os.getpid())
        atexit.register(leave_process_group, os.getpid())


def leave_process_group(owner: int) -> None:
    """End gloo's threads before the interpreter ends, where a script has not done so.

    One that still drops the last collective's objects when Python is gone aborts the process
    ("terminate called without an active exception", exit status 134): a job that had finished
    would count as failed. After an uncaught exception nothing is waited for.

    Args:
        owner: The process that made the group; in its forked children there is nothing to end.
    """
    failed = getattr(sys, "last_type", None) is not None
    if owner != os.getpid() or failed or not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    # In a thread: a collective that others never entered would be waited for.
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(LEAVING_SECONDS)


def share_seed() -> None:
    """Let all ranks draw as the first one, where nobody seeded them alike. Every rank calls it.

    A script that initialises its model without a seed gets another one on each rank: with
    DistributedDataParallel the first rank's counts, here all have to have the same. Only the
    seeds that are there when `Accelerator` is made count: what the script does afterwards, such as
    accelerate's `set_seed(seed, device_specific=True)`, stays.
    """
    seeds: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(seeds, torch.initial_seed())
    if len(set(seeds)) > 1:
        torch.manual_seed(seeds[0])
        log_once(
            logger,
            "The ranks had different torch seeds: all draw like rank 0 from here on, so that a "
            "model that the script initialises is the same on each.",
        )


def take_accumulation(gradient_state: GradientState) -> int:
    """Return `gradient_accumulation_steps`, and let Accelerate take each iteration for an update.

    One iteration of the loop gets all the batches that are accumulated, as micro-batches.
    """
    steps: int = gradient_state.num_steps
    gradient_state.plugin_kwargs["num_steps"] = 1
    if steps > 1:
        log_once(
            logger,
            f"gradient_accumulation_steps={steps} is taken as num_micro_batches={steps}: one "
            "iteration of the loop takes all of them and is one update.",
        )
    return steps


def enter_megatron_state(plugin: MegatronLMPlugin) -> None:
    """Set the distributed type and the plugin in both of Accelerate's shared states."""
    PartialState._shared_state["distributed_type"] = DistributedType.MEGATRON_LM
    AcceleratorState._shared_state["distributed_type"] = DistributedType.MEGATRON_LM
    AcceleratorState._shared_state["megatron_lm_plugin"] = plugin
    plugin.set_mixed_precision(AcceleratorState._shared_state["_mixed_precision"])


def as_plugin(plugin: object) -> MegatronLMPlugin:
    """Return the plugin that was given, else the one in use, else what the environment describes.

    Raises:
        ConfigurationError: What was given is no `MegatronLMPlugin` of this package.
    """
    # A library's own Accelerator() must not replace the script's plugin by another one.
    in_use = AcceleratorState._shared_state.get("megatron_lm_plugin")
    resolved: Any = plugin or in_use or MegatronLMPlugin()
    if isinstance(resolved, MegatronLMPlugin):
        return cast("MegatronLMPlugin", resolved)
    raise ConfigurationError(
        f"megatron_lm_plugin is a {type(plugin).__module__}.{type(plugin).__qualname__}; give "
        "accelerate_megatron.MegatronLMPlugin(...), which has the same fields."
    )


def refuse_other_strategies(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `Accelerator` that would have no effect or another one here.

    Raises:
        UnsupportedError: One is given; names it.
    """
    unread = [*_unread_loader_settings(arguments), *_unread_handlers(arguments)]
    if arguments.get("step_scheduler_with_optimizer") is False:
        unread.append("step_scheduler_with_optimizer=False")
    if unread:
        raise UnsupportedError(
            f"{', '.join(unread)} would have no effect: with Megatron-Core a DataLoader's batch "
            "size is the micro-batch of one rank, each replica fetches its own batches, and the "
            "scheduler moves with the update. Leave it out."
        )
    given = [name for name in OTHER_STRATEGIES if arguments.get(name) is not None]
    given += [
        name
        for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
        if parse_bool(os.environ.get(name, "false"), name)
    ]
    if given:
        raise UnsupportedError(
            f"{', '.join(given)} cannot be combined with Megatron-Core. Leave it out and set the "
            "layout on MegatronLMPlugin, or use accelerate.Accelerator."
        )


_LOADER_SETTINGS = (
    "split_batches",
    "dispatch_batches",
    "use_seedable_sampler",
    "data_seed",
    "use_stateful_dataloader",
)
_HANDLERS = (InitProcessGroupKwargs, ProfileKwargs)
"""Handlers that act: one on the process group, one on `Accelerator.profile`."""


def _unread_loader_settings(arguments: Mapping[str, Any]) -> list[str]:
    config = arguments.get("dataloader_config")
    given = [name for name in _LOADER_SETTINGS if getattr(config, name, None)]
    unread = [f"dataloader_config.{name}" for name in given]
    return unread + (["split_batches=True"] if arguments.get("split_batches") is True else [])


def _unread_handlers(arguments: Mapping[str, Any]) -> list[str]:
    handlers = arguments.get("kwargs_handlers") or ()
    return [type(handler).__name__ for handler in handlers if not isinstance(handler, _HANDLERS)]


def is_last_local_process(process_index: int, num_processes: int) -> bool:
    """Return whether this is the last rank of its machine.

    Accelerate calls the last rank of the job the main one under Megatron-LM; so each
    machine's is its last one.
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    local_rank = int(os.environ.get("LOCAL_RANK", process_index))
    return local_rank == local_size - 1
