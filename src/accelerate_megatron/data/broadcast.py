"""Sends nested values with tensors in them from one rank to a group, in two collectives.

Everything travels in one buffer of bytes: a pickled header, which holds the structure and all
that is not a tensor, then the bytes of the tensors. The structure is packed before the first
collective, so that what cannot be sent fails on the sender alone and can still be reported.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# A tensor can only be viewed in the buffer where its offset is a multiple of its item size.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Slot:
    """Stands in the header for a tensor: where it lies behind the header, and its form."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PackedValue:
    """A value ready to be sent: its structure as bytes, and its tensors in order."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    num_tensor_bytes: int


def pack_value(value: object) -> PackedValue:
    """Take the tensors out of dicts, lists and tuples, and pickle the rest.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: Something in `value` cannot be pickled.
    """
    tensors: list[torch.Tensor] = []
    end = 0

    def slot_of(tensor: torch.Tensor) -> _Slot:
        nonlocal end
        tensors.append(tensor.detach())
        offset, num_bytes = end, tensor.numel() * tensor.element_size()
        end = offset + _aligned(num_bytes)
        return _Slot(offset, num_bytes, tuple(tensor.shape), tensor.dtype)

    header = pickle.dumps(_replace(value, torch.Tensor, slot_of))
    return PackedValue(header, tuple(tensors), end)


def broadcast_value(
    packed: PackedValue | None,
    *,
    source: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Any:
    """Return the value of rank `source` with its tensors on `device`; every rank gets a copy.

    Every rank of `group` must call it. Communicates twice over `group`, on the CPU where the
    group can, otherwise on `device`.

    Args:
        packed: What `source` sends; ignored on the other ranks.
        source: The sender's global rank.
        group: The ranks that take part; None is all of them.
        device: Where the tensors are wanted. With NCCL it has to be the rank's own GPU.
    """
    transport = transport_device(group, device)
    sizes = torch.zeros(2, dtype=torch.int64)
    is_source = dist.get_rank() == source
    if is_source:
        assert packed is not None
        sizes = torch.tensor([len(packed.header), packed.num_tensor_bytes])
    sizes = sizes.to(transport)
    dist.broadcast(sizes, src=source, group=group)
    header_bytes, tensor_bytes = sizes.tolist()

    start = _aligned(header_bytes)
    buffer = torch.zeros(start + tensor_bytes, dtype=torch.uint8)
    if is_source:
        assert packed is not None
        _fill(buffer, start, packed)
    buffer = buffer.to(transport)
    dist.broadcast(buffer, src=source, group=group)

    def tensor_of(slot: _Slot) -> torch.Tensor:
        first = start + slot.offset
        values = buffer[first : first + slot.num_bytes].view(slot.dtype).reshape(slot.shape)
        # A copy even on the same device: views of one buffer would share its version counter,
        # and writing to the labels would then look to autograd like writing to the ids.
        return values.to(device, copy=True)

    header = buffer[:header_bytes].cpu().numpy().tobytes()
    return _replace(pickle.loads(header), _Slot, tensor_of)


def transport_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Return the device whose tensors `group` can send: the CPU if it can, else `device`."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else device


def to_device(value: object, device: torch.device) -> Any:
    """Return `value` with every tensor in it on `device`; those that are there stay as they are."""
    return _replace(value, torch.Tensor, lambda tensor: tensor.to(device))


def _fill(buffer: torch.Tensor, start: int, packed: PackedValue) -> None:
    """Write the header to the front of `buffer` and the tensors behind `start`."""
    header = torch.frombuffer(bytearray(packed.header), dtype=torch.uint8)
    buffer[: len(header)] = header
    offset = start
    for tensor in packed.tensors:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        buffer[offset : offset + len(raw)] = raw
        offset += _aligned(len(raw))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _replace(value: object, kind: type[Any], replacement: Any) -> Any:
    """Return `value` with each object of `kind` in its dicts, lists and tuples replaced."""
    if isinstance(value, kind):
        return replacement(value)
    if isinstance(value, Mapping):
        return {key: _replace(item, kind, replacement) for key, item in value.items()}
    if type(value) in (list, tuple):
        items: Any = value
        return type(items)(_replace(item, kind, replacement) for item in items)
    return value
