"""A model chunk seen as shards: which rows of which parameter this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    apply_factories,
    is_main_replica,
)

from accelerate_megatron.engine.wrapping import innermost


@dataclass(frozen=True)
class Shard:
    """This rank's piece of one parameter, and where it lies in the whole.

    Attributes:
        name: Canonical Megatron name with the layer's index over the whole model,
            "decoder.layers.3.mlp.linear_fc1.weight".
        data: A view: writing to it writes the parameter.
        parameter: The parameter, or the router's correction bias, that `data` is a view of.
        global_shape: Shape of the whole parameter, the vocabulary padded.
        global_offset: Where `data` starts in it.
        is_main_replica: Whether this rank speaks for the piece; one rank does for each.
    """

    name: str
    data: torch.Tensor
    parameter: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_main_replica: bool


def shards_of_module(chunk: torch.nn.Module, *, is_split: bool = False) -> list[Shard]:
    """Return this rank's pieces of the parameters of one chunk, in the order of the model.

    A tied output layer on the last stage appears under the embedding's name. The two
    halves of a gated MLP's first layer appear as two pieces of one name. The experts of a layer
    are one parameter, expert below expert, of which each local expert is a piece.

    Args:
        chunk: The chunk; its wrappers, if any, leave parameters whole.
        is_split: Whether each data-parallel rank will keep some rows only, so that all of
            them speak for what they have.
    """
    module = innermost(chunk)
    parameters = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    state = sharded_state(module)
    apply_factories(state)
    return [
        _shard(piece, parameters[local_name], is_split)
        for local_name, value in state.items()
        for piece in (value if isinstance(value, list) else [value])
        if isinstance(piece, ShardedTensor)
    ]


def sharded_state(module: torch.nn.Module, *, has_stacked_layers: bool = False) -> dict[str, Any]:
    """Return Megatron's entries of a model's tensors by local name; nothing communicates.

    Args:
        module: The model of a chunk, without wrappers.
        has_stacked_layers: Whether layers that are alike are one tensor, with a dimension for the
            layer in front.
    """
    metadata = {
        "non_homogeneous_layers": not has_stacked_layers,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    return state


def _shard(piece: ShardedTensor, parameter: torch.Tensor, is_split: bool) -> Shard:
    shape, offset = tuple(piece.global_shape), tuple(piece.global_offset)
    if piece.prepend_axis_num:
        # Megatron counts experts in a dim of their own, which the piece itself does not have.
        (num_experts, rows, *rest), (expert, first, *others) = shape, offset
        shape, offset = (num_experts * rows, *rest), (expert * rows + first, *others)
    replica = piece.replica_id
    return Shard(
        name=piece.key,
        data=piece.data.detach(),
        parameter=parameter,
        global_shape=shape,
        global_offset=offset,
        # The last number of a replica's id counts data-parallel ranks.
        is_main_replica=is_main_replica((*replica[:-1], 0) if is_split else replica),
    )
