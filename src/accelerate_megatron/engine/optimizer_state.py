"""What an optimizer keeps: its tensors as entries of a checkpoint, and its numbers.

An entry is Megatron's ShardedTensor, or the factory of several; that of an optimizer's tensor
lies in the whole as its parameter does, whether the optimizer is distributed or not, so that
each loads what the other has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from accelerate_megatron.engine.fused_adam import FusedAdam

OPTIMIZER_PREFIX = "optimizer.state."
"""In front of the name of an optimizer's tensor; then the kind, then the parameter's name."""
MAIN_PARAMETER = "fp32_param"
"""The kind of the fp32 copies of bf16 or fp16 parameters."""

Entries = Mapping[str, Any]
"""Chunk and local name -> entry of a parameter, which holds the parameter itself."""

_STEP = "step"
_OFFLOADED_COPY = "master_param"
"""The kind under which an offloaded optimizer lists what it updates: the fp32 copy once more."""


def optimizer_entries_to_share(optimizer: Any, model: Entries) -> list[Any]:
    """Return the entries of tensors that lie as the parameters do, to be saved from where they are.

    A distributed optimizer has none, None neither.
    """
    entries = []
    for part in _parts(optimizer):
        if not isinstance(part, DistributedOptimizer):
            _allocate(part)
            entries += _plain_entries(part, model)
    return entries


def optimizer_entries_to_gather(
    optimizer: Any, model: Entries, keeps_main_parameters: bool
) -> list[Any]:
    """Return the entries of a distributed optimizer's tensors, gathered. Every rank calls it."""
    entries = []
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            _allocate(part)
            entries += _gathered_entries(part, model, keeps_main_parameters)
    return entries


def optimizer_entries_to_load(
    optimizer: Any, model: Entries, keeps_main_parameters: bool
) -> tuple[list[Any], list[Callable[[], None]]]:
    """Return entries to read into, and what to call after that. Communicates with nobody."""
    entries = []
    after: list[Callable[[], None]] = []
    for part in _parts(optimizer):
        _allocate(part, to_load=True)
        if isinstance(part, DistributedOptimizer):
            buffered, copy_over = _buffer_entries(part, model, keeps_main_parameters)
            entries += buffered
            after.append(copy_over)
        else:
            entries += _plain_entries(part, model)
            after.append(partial(_refresh_offloaded, part.optimizer))
    return entries, after


def optimizer_numbers(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer keeps besides tensors, as JSON can hold it.

    Steps done, the loss scaler, and the rates of each parameter group, which a user without a
    scheduler may have set. Groups are told apart by what they were made with, as they lie on
    different ranks in different orders.
    """
    steps = [int(group[_STEP]) for group in _groups_with_step(optimizer) if _STEP in group]
    steps += [int(state[_STEP]) for state in _states_with_step(optimizer)]
    numbers: dict[str, Any] = {
        "step": max(steps, default=None),
        "groups": {
            _group_name(group): {name: float(group[name]) for name in ("lr", "weight_decay")}
            for group in optimizer.param_groups
        },
    }
    scaler = getattr(_parts(optimizer)[0], "grad_scaler", None)
    if scaler is not None:
        numbers["grad_scaler"] = {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in scaler.state_dict().items()
        }
    return numbers


def set_optimizer_numbers(optimizer: Any, numbers: dict[str, Any]) -> None:
    """Take over what `optimizer_numbers` returned, also on other ranks in another layout."""
    for group in optimizer.param_groups:
        group.update(numbers["groups"].get(_group_name(group), {}))
    if numbers["step"] is not None:
        for group in _groups_with_step(optimizer):
            group[_STEP] = numbers["step"]
        for state in _states_with_step(optimizer):
            state[_STEP].fill_(numbers["step"])
    for part in _parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None and "grad_scaler" in numbers:
            now = scaler.state_dict()
            scaler.load_state_dict(
                {
                    name: torch.full_like(now[name], value)
                    if isinstance(now.get(name), torch.Tensor)
                    else value
                    for name, value in numbers["grad_scaler"].items()
                }
            )


def _steppers(optimizer: Any) -> Iterator[Any]:
    """Return the torch optimizers that make the updates: an offloaded one consists of several."""
    for part in _parts(optimizer):
        yield from getattr(part.optimizer, "sub_optimizers", [part.optimizer])


def _groups_with_step(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Return the groups of the optimizers that count their steps per group."""
    for stepper in _steppers(optimizer):
        yield from stepper.param_groups


def _states_with_step(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Return the states of torch's own optimizers, which count their steps per parameter."""
    for stepper in _steppers(optimizer):
        yield from (state for state in stepper.state.values() if _STEP in state)


def _group_name(group: dict[str, Any]) -> str:
    made_with = (
        "user_group",
        "max_lr",
        "lr_factor",
        "start_wd",
        "end_wd",
        "betas",
        "eps",
        "momentum",
        "is_expert_parallel",
    )
    return ",".join(f"{name}={group[name]}" for name in made_with if name in group)


def _parts(optimizer: Any) -> list[Any]:
    """Return the optimizers that Megatron chains together; those without parameters left out."""
    if optimizer is None:
        return []
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _state_entry(entry: Any, kind: str, data: torch.Tensor) -> Any:
    """Return the entry of an optimizer's tensor, which lies as its parameter does."""
    changes: dict[str, Any] = {"key": f"{OPTIMIZER_PREFIX}{kind}.{entry.key}", "data": data}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(entry, **changes)


def _entry_of(model: Entries) -> dict[int, Any]:
    return {id(entry.data): entry for entry in model.values()}


def _allocate(part: Any, *, to_load: bool = False) -> None:
    """Make the state tensors that the first update would make, where they are zeros.

    A dampened momentum does not begin at zero but with a whole gradient, so before the first update
    there is none to save. To be read into it is made all the same.
    """
    if hasattr(part.optimizer, "sub_optimizers"):
        for offloaded in part.optimizer.sub_optimizers:
            _allocate_offloaded(offloaded, to_load=to_load)
        part.optimizer._sync_sub_optimizers_state_to_hdo()
        return
    if part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
        return
    for group in part.optimizer.param_groups:
        if _has_momentum(group, to_load=to_load):
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _has_momentum(group: dict[str, Any], *, to_load: bool) -> bool:
    return bool(group.get("momentum")) and (to_load or not group["dampening"])


def _allocate_offloaded(optimizer: torch.optim.Optimizer, *, to_load: bool) -> None:
    """Make the states of one of the optimizers that an offloaded one consists of."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state and "betas" in group:
                if not isinstance(optimizer, FusedAdam):
                    state[_STEP] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            elif not state and _has_momentum(group, to_load=to_load):
                state["momentum_buffer"] = torch.zeros_like(parameter)


def _plain_entries(part: Any, model: Entries) -> list[Any]:
    """Return the entries of an optimizer whose tensors have the shapes of the parameters."""
    entry_of = _entry_of(model)
    entries = []
    for parameter, main in _main_of(part):
        entry = entry_of[id(parameter)]
        if main is not parameter:
            entries.append(_state_entry(entry, MAIN_PARAMETER, main.data))
        entries += [
            _state_entry(entry, kind, value)
            for kind, value in part.optimizer.state[main].items()
            if kind not in (_STEP, _OFFLOADED_COPY) and isinstance(value, torch.Tensor)
        ]
    return entries


@torch.no_grad()
def _refresh_offloaded(optimizer: Any) -> None:
    """Copy what was loaded to where an offloaded optimizer updates it, if that is elsewhere."""
    for parameter, updated in getattr(optimizer, "param_to_inner_param", {}).items():
        if updated is not parameter:
            updated.copy_(parameter)


def _main_of(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Return each parameter with the one that is updated in its place."""
    if not hasattr(part, "fp32_from_float16_groups"):
        for parameter in part.get_parameters():
            yield parameter, parameter
        return
    for parameters, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from zip(parameters, mains, strict=True)
    for parameters in part.fp32_from_fp32_groups:
        for parameter in parameters:
            yield parameter, parameter


def _gathered_entries(
    part: DistributedOptimizer, model: Entries, keeps_main_parameters: bool
) -> list[Any]:
    """Return the entries of a distributed optimizer; none but on the first rank of its group.

    One tensor after another is put together there from the slices of the ranks. Megatron's own way
    holds all of them at once, and knows Adam's only.
    """
    group = part.data_parallel_group
    entry_of = _entry_of(model)
    kinds = _kinds_of(part, keeps_main_parameters)
    entries = []
    for buffer in part.buffers:
        for parameter in buffer.param_index_map:
            for kind, dtype in kinds.items():
                whole = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
                if parameter in part.model_param_gbuf_map:
                    mine = part._get_model_param_range_map(parameter)["param"]
                    state = part._get_main_param_and_optimizer_states(parameter)[kind]
                    whole[mine.start : mine.end] = state.detach().flatten()
                # Bytes, of which all but one rank's are zeros: their sum is exact.
                dist.reduce(whole.view(torch.uint8), dist.get_global_rank(group, 0), group=group)
                if group.rank() == 0:
                    name = MAIN_PARAMETER if kind == "param" else kind
                    data = whole.view(parameter.shape).cpu()
                    entries.append(_state_entry(entry_of[id(parameter)], name, data))
    return entries


def _kinds_of(part: DistributedOptimizer, keeps_main_parameters: bool) -> dict[str, torch.dtype]:
    """Return the kinds of state tensors, also on ranks that hold no slice of any."""
    mine: dict[str, torch.dtype] = {}
    for parameter in part.model_param_gbuf_map:
        states = part._get_main_param_and_optimizer_states(parameter)
        mine |= {
            kind: value.dtype
            for kind, value in states.items()
            if kind not in (_STEP, _OFFLOADED_COPY)
        }
    every: list[Any] = [None] * part.data_parallel_group.size()
    dist.all_gather_object(every, mine, group=part.data_parallel_group)
    kinds = {kind: dtype for of_rank in every for kind, dtype in of_rank.items()}
    if not keeps_main_parameters:
        kinds.pop("param", None)
    return dict(sorted(kinds.items()))


def _buffer_entries(
    part: DistributedOptimizer, model: Entries, keeps_main_parameters: bool
) -> tuple[list[Any], Callable[[], None]]:
    """Return entries to read whole states into, and what copies this rank's slices over.

    Only parameters of which this rank holds a slice get buffers: 1/dp of them, and those at the
    edges. In fp32 the slices that are updated are views of the parameters.
    """
    entry_of = _entry_of(model)
    buffers: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
    entries = []
    for parameter in part.model_param_gbuf_map:
        states = part._get_main_param_and_optimizer_states(parameter)
        buffers[parameter] = {
            kind: torch.zeros(parameter.shape, dtype=value.dtype)
            for kind, value in states.items()
            if kind not in (_STEP, _OFFLOADED_COPY) and (kind != "param" or keeps_main_parameters)
        }
        entries += [
            _state_entry(
                entry_of[id(parameter)], MAIN_PARAMETER if kind == "param" else kind, buffer
            )
            for kind, buffer in buffers[parameter].items()
        ]

    @torch.no_grad()
    def copy_over() -> None:
        for parameter, states in buffers.items():
            mine = part._get_model_param_range_map(parameter)["param"]
            slices = {kind: data.flatten()[mine.start : mine.end] for kind, data in states.items()}
            if not keeps_main_parameters:
                slices["param"] = part._get_main_param_and_optimizer_states(parameter)["param"]
            slices[_OFFLOADED_COPY] = slices["param"]  # read by an offloaded optimizer only
            part._set_main_param_and_optimizer_states(parameter, slices)

    return entries, copy_over
