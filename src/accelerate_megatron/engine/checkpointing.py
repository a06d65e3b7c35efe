"""The tensors of a checkpoint: which piece of which global tensor this rank holds.

Names and layout are those of `megatron.core.dist_checkpointing`, so that its own tools read what
is written here. `optimizer_state` has the optimizer's part. What is *not* here: files, which come
in as a storage writer or reader, and everything that is not a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from accelerate_megatron.engine.fully_sharded import refuse_split_parameters
from accelerate_megatron.engine.optimizer_state import (
    MAIN_PARAMETER,
    OPTIMIZER_PREFIX,
    optimizer_entries_to_gather,
    optimizer_entries_to_load,
    optimizer_entries_to_share,
)
from accelerate_megatron.engine.shards import sharded_state
from accelerate_megatron.engine.wrapping import finish_parameter_gather, innermost


@dataclass
class TensorPieces:
    """This rank's pieces of the tensors of a checkpoint.

    Attributes:
        by_name: Global name -> pieces. When loading, the pieces are what is read into.
        gathered: Names of those in memory of their own, which the run does not change.
    """

    by_name: dict[str, list[ShardedTensor]]
    gathered: frozenset[str] = frozenset()
    _after_load: list[Callable[[], None]] = field(default_factory=list)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return name -> (global shape, whether its rows may differ in padding)."""
        return {
            name: (tuple(pieces[0].global_shape), bool(pieces[0].allow_shape_mismatch))
            for name, pieces in self.by_name.items()
        }

    def num_bytes(self) -> int:
        """Return the size of this rank's pieces."""
        return sum(
            piece.data.numel() * piece.data.element_size()
            for pieces in self.by_name.values()
            for piece in pieces
        )

    def copied_into(
        self, buffer_for: Callable[[str, int, torch.Tensor], torch.Tensor]
    ) -> TensorPieces:
        """Return the same pieces with values of their own: those of the run, copied into buffers.

        Args:
            buffer_for: Given name, number and data of a piece, returns the tensor to copy into.
        """
        lasting = {name: of for name, of in self.by_name.items() if name not in self.gathered}
        copies = {
            name: [
                replace(piece, data=buffer_for(name, index, piece.data))
                for index, piece in enumerate(found)
            ]
            for name, found in lasting.items()
        }
        with torch.no_grad():
            for name, found in lasting.items():
                for piece, copy in zip(found, copies[name], strict=True):
                    copy.data.copy_(piece.data, non_blocking=True)
        device = self.device()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return TensorPieces(self.by_name | copies, self.gathered)

    def device(self) -> torch.device:
        """Return where the tensors of the run lie; the CPU if there are none."""
        devices = {piece.data.device for found in self.by_name.values() for piece in found}
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def finish_loading(self) -> None:
        """Hand over to the optimizer what was read into buffers of its own."""
        for action in self._after_load:
            action()


def pieces_to_save(
    chunks: list[torch.nn.Module], optimizer: Any, *, keeps_main_parameters: bool
) -> TensorPieces:
    """Return the pieces that this rank writes. Every rank calls it; see `pieces_to_load`.

    A distributed optimizer gathers its state over the data-parallel ranks on the first of them, in
    host memory; the other pieces are those of `lasting_pieces`.

    Args:
        chunks: This rank's model chunks.
        optimizer: Megatron's optimizer; None leaves it out.
        keeps_main_parameters: Whether there are fp32 copies besides the parameters.
    """
    entries = optimizer_entries_to_gather(optimizer, _model_entries(chunks), keeps_main_parameters)
    gathered = _written_here(entries, keeps_main_parameters)
    lasting = lasting_pieces(chunks, optimizer, keeps_main_parameters=keeps_main_parameters)
    return TensorPieces(lasting.by_name | gathered, frozenset(gathered))


def lasting_pieces(
    chunks: list[torch.nn.Module], optimizer: Any, *, keeps_main_parameters: bool
) -> TensorPieces:
    """Return those of `pieces_to_save` that share memory with the run. Every rank calls it."""
    model = _model_entries(chunks)
    entries = [*model.values(), *optimizer_entries_to_share(optimizer, model)]
    return TensorPieces(_written_here(entries, keeps_main_parameters))


def _written_here(
    entries: list[Any], keeps_main_parameters: bool
) -> dict[str, list[ShardedTensor]]:
    """Return global name -> pieces of `entries` that this rank writes and no other."""
    return {
        name: mine
        for name, found in _split(entries).items()
        if (mine := [piece for piece in found if is_main_replica(piece.replica_id)])
        and (keeps_main_parameters or not _is_main_parameter(name))
    }


def pieces_to_load(
    chunks: list[torch.nn.Module],
    optimizer: Any,
    *,
    keeps_main_parameters: bool,
    saved_names: set[str],
    has_stacked_layers: bool = False,
) -> TensorPieces:
    """Return the pieces that this rank reads into. Communicates with nobody.

    Args:
        chunks: This rank's model chunks.
        optimizer: Megatron's optimizer; None leaves it as it is.
        keeps_main_parameters: Whether there are fp32 copies besides the parameters.
        saved_names: The names in the checkpoint: one that was written in fp32 has no copies, and
            the parameters are read in their place; the other way round likewise.
        has_stacked_layers: Whether the layers in the checkpoint are one tensor, with a dimension
            for the layer in front, as Megatron-LM writes layers that are alike.
    """
    model = _model_entries(chunks, has_stacked_layers=has_stacked_layers)
    entries = list(model.values())
    of_optimizer, after = optimizer_entries_to_load(optimizer, model, keeps_main_parameters)
    entries += of_optimizer
    if not keeps_main_parameters:
        entries = [_from_main_parameter(entry, saved_names) for entry in entries]
    pieces: dict[str, list[ShardedTensor]] = {}
    for name, found in _split(entries).items():
        if _is_main_parameter(name) and name not in saved_names:
            name = name[len(f"{OPTIMIZER_PREFIX}{MAIN_PARAMETER}.") :]
            found = [replace(piece, key=name) for piece in found]
        pieces.setdefault(name, []).extend(found)
    return TensorPieces(pieces, _after_load=after)


def write_pieces(
    pieces: TensorPieces, writer: StorageWriter, group: dist.ProcessGroup | None = None
) -> None:
    """Write the pieces of all ranks through `writer`. Every rank calls it.

    Communicates over `group`, one of all ranks; None is the default one.

    Raises:
        CheckpointException: Writing failed on some rank; raised on all.
    """
    save(
        mcore_to_pyt_state_dict(dict(pieces.by_name), False),
        storage_writer=writer,
        process_group=group,
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def read_pieces(pieces: TensorPieces, reader: StorageReader) -> None:
    """Read this rank's pieces through `reader`, in place. Communicates with nobody.

    Names and shapes must have been compared before: parameters are overwritten one by one.
    """
    every = [piece for found in pieces.by_name.values() for piece in found]
    load(
        mcore_to_pyt_state_dict(dict(pieces.by_name), True),
        storage_reader=reader,
        planner=MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[p for p in every if not p.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                p.key: p for p in every if p.allow_shape_mismatch
            },
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        ),
        no_dist=True,
    )
    pieces.finish_loading()


def _model_entries(
    chunks: list[torch.nn.Module], *, has_stacked_layers: bool = False
) -> dict[str, Any]:
    """Return chunk and local name -> entry of a tensor of the model, each with its parameter."""
    refuse_split_parameters(chunks)
    finish_parameter_gather(chunks)
    entries: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        state = sharded_state(innermost(chunk), has_stacked_layers=has_stacked_layers)
        for name, entry in _leaves(state, str(index)):
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
                entries[name] = entry
            elif isinstance(entry, ShardedObject) and not name.endswith("_extra_state"):
                raise TypeError(f"{entry.key} of the model is no tensor and would not be saved.")
    return entries


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _leaves(value, f"{name}.{key}")
    else:
        yield name, state


def _split(entries: list[Any]) -> dict[str, list[ShardedTensor]]:
    """Return global name -> pieces: factories give several, such as gate and up of an MLP."""
    state: dict[str, Any] = {str(index): entry for index, entry in enumerate(entries)}
    apply_factories(state)
    pieces: dict[str, list[ShardedTensor]] = {}
    for _, piece in _leaves(state, ""):
        pieces.setdefault(piece.key, []).append(piece)
    return pieces


def _is_main_parameter(name: str) -> bool:
    return name.startswith(f"{OPTIMIZER_PREFIX}{MAIN_PARAMETER}.")


def _from_main_parameter(entry: Any, saved_names: set[str]) -> Any:
    """Let a parameter in fp32 be read from its fp32 copy where the checkpoint has one."""
    copy = f"{OPTIMIZER_PREFIX}{MAIN_PARAMETER}.{entry.key}"
    return replace(entry, key=copy) if copy in saved_names else entry
