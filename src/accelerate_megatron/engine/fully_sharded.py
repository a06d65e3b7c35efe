"""PyTorch's FSDP2 around a model chunk, with the gradients that Megatron's own wrapper gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
)
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.tensor import DTensor

from accelerate_megatron.engine.shards import Shard, shards_of_module
from accelerate_megatron.engine.wrapping import innermost
from accelerate_megatron.errors import UnsupportedError


class FullySharded(TorchFullyShardedDataParallel):  # type: ignore[misc]  # megatron is untyped
    """Parameters, gradients and optimizer state split over data- and context-parallel ranks.

    Each parameter is a `DTensor` of which a rank holds some rows; a layer's are gathered when
    the layer runs, and let go after it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
    ) -> None:
        """Split the parameters of `module`, which must have their weights already."""
        pieces = _pieces(module)
        super().__init__(
            config=config,
            ddp_config=ddp_config,
            module=module,
            # Megatron's own set has the linear layers, which are inside of layers split already.
            sub_modules_to_wrap={TransformerLayer, LanguageModelEmbedding, RotaryEmbedding},
        )
        self._pieces = pieces
        self._sums_gradients = config.calculate_per_token_loss

    def shards(self, *, main_copies: bool = False) -> list[Shard]:
        """Return the pieces of parameters that this rank holds; none where it has no row.

        With `main_copies`, their data are the optimizer's fp32 copies, where it has some.
        """
        held = [
            _held_part(piece, parameter, main_copies=main_copies)
            for piece, parameter in self._split_pieces()
        ]
        return [shard for shard in held if shard is not None]

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield canonical name and parameter, also of those without a row on this rank."""
        return ((piece.name, parameter) for piece, parameter in self._split_pieces())

    def _split_pieces(self) -> Iterator[tuple[_Piece, torch.Tensor]]:
        parameters = dict(innermost(self).named_parameters())
        return ((piece, parameters[piece.parameter]) for piece in self._pieces)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Turn FSDP2's means over ranks into sums where Megatron's wrapper sums.

        With per-token loss Megatron divides by the tokens of all ranks afterwards.
        """
        if self._sums_gradients:
            self.scale_gradients(dist.get_world_size(self.process_group))

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply the gradients of this rank's rows."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop the gradients; there is no buffer."""
        for parameter in self.module.parameters():
            parameter.grad = None


def refuse_split_parameters(chunks: Iterable[torch.nn.Module]) -> None:
    """Refuse chunks whose parameters are split over replicas, for checkpoints.

    Raises:
        UnsupportedError: A chunk is `FullySharded`; alike on every rank.
    """
    if any(isinstance(chunk, FullySharded) for chunk in chunks):
        raise UnsupportedError(
            "save_state and load_state cannot be used with use_custom_fsdp: Megatron's checkpoints "
            "know no parameters that are split over the replicas. save_pretrained writes the "
            "weights; use_distributed_optimizer splits the optimizer and can be saved."
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor that this rank holds; all of them when it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class _Piece:
    """A shard as it was before its parameter was split, without its values.

    Attributes:
        name: Canonical name.
        parameter: Local name of its parameter.
        first: Row of the parameter at which it begins.
        num_rows: Its rows.
        global_shape: See `Shard`.
        global_offset: See `Shard`.
        is_main_replica: See `Shard`.
    """

    name: str
    parameter: str
    first: int
    num_rows: int
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_main_replica: bool


def _pieces(module: torch.nn.Module) -> list[_Piece]:
    names = {id(parameter): name for name, parameter in innermost(module).named_parameters()}
    pieces = []
    for shard in shards_of_module(module, is_split=True):
        begins = shard.data.storage_offset() - shard.parameter.storage_offset()
        pieces.append(
            _Piece(
                name=shard.name,
                parameter=names[id(shard.parameter)],
                first=begins // shard.parameter.stride(0),
                num_rows=shard.data.shape[0],
                global_shape=shard.global_shape,
                global_offset=shard.global_offset,
                is_main_replica=shard.is_main_replica,
            )
        )
    return pieces


def _held_part(
    piece: _Piece, parameter: torch.Tensor, *, main_copies: bool = False
) -> Shard | None:
    """Return the part of `piece` that lies in this rank's rows of its parameter, if any."""
    # Megatron makes the copy of the split parameter, so it is split alike.
    values = getattr(parameter, "main_param", parameter) if main_copies else parameter
    local = local_part(values.detach())
    start = _first_row(parameter)
    begin = max(piece.first, start)
    end = min(piece.first + piece.num_rows, start + local.shape[0])
    if begin >= end:
        return None
    row, *others = piece.global_offset
    return Shard(
        name=piece.name,
        data=local[begin - start : end - start],
        parameter=parameter,
        global_shape=piece.global_shape,
        global_offset=(row + begin - piece.first, *others),
        is_main_replica=piece.is_main_replica,
    )


def _first_row(parameter: torch.Tensor) -> int:
    """Return the row at which this rank's part of a parameter begins: torch.chunk's rule."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    rows: int = -(-parameter.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, parameter.shape[0])
