"""Running a model one token at a time, over its pipeline stages.

The layers are called one by one rather than through GPTModel: positions differ by row where
prompts are padded, only the last token needs logits, and the stages send each other what they
compute without a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.attention import SdpaCoreAttention
from accelerate_megatron.engine.groups import Ranks
from accelerate_megatron.engine.kv_cache import KeyValueCache, Turn, attach
from accelerate_megatron.engine.lean_linear import lean_linear_layers
from accelerate_megatron.engine.model import GPTChunk
from accelerate_megatron.engine.translate import DTYPES
from accelerate_megatron.engine.wide_products import wide_products
from accelerate_megatron.engine.wrapping import finish_parameter_gather, innermost

_SEQUENCE_PARALLEL_SWITCHES = (
    "sequence_parallel",
    "reduce_scatter_embeddings",
    "scatter_to_sequence_parallel",
)
"""Where Megatron's modules and configs keep whether activations are split along the sequence."""


class Decoder:
    """This rank's part of a model that reads a prompt and then tokens one by one.

    Every rank of a replica makes the same calls. Sequences are not split, neither by sequence
    nor by context parallelism: the ranks of a context-parallel group do the same.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], run: RunConfig, ranks: Ranks, device: torch.device
    ) -> None:
        """Take the chunks as they are between two updates.

        Args:
            chunks: This rank's chunks, wrapped; the modules inside must be `GPTChunk`.
            run: The resolved run.
            ranks: This rank's position.
            device: Where the model computes.
        """
        self._wrapped = chunks
        self._chunks: list[Any] = [innermost(chunk) for chunk in chunks]
        assert can_decode(chunks)
        self._run = run
        self._ranks = ranks
        self._device = device
        self._pipeline = dist.get_process_group_ranks(ranks.pp_group)
        members = ranks.all_replicas[ranks.dp_rank]
        self.source = members[-(len(members) // ranks.pp_size)]
        self._cache: KeyValueCache | None = None
        self._frequencies: torch.Tensor | None = None

    @contextmanager
    def reading(self, capacity: int, padding: torch.Tensor | None) -> Iterator[None]:
        """Hold a cache inside the block; afterwards the model trains on as if nothing had been.

        Args:
            capacity: Tokens of a row, padding included, that the cache has room for.
            padding: Bool [b, s], True before a row's first token, or None.
        """
        finish_parameter_gather(self._wrapped)
        self._cache = KeyValueCache(capacity, padding)
        if self._run.shape.position_embedding == "rope":
            self._frequencies = self._rotary_table(capacity)
        modules = [module for chunk in self._chunks for module in chunk.modules()]
        with (
            torch.no_grad(),
            _evaluating(modules),
            _unsplit_sequences(modules),
            lean_linear_layers(modules),
            wide_products(self._chunks),
        ):
            attach(_cores(self._chunks), self._cache)
            try:
                yield
            finally:
                attach(_cores(self._chunks), None)
                self._cache = self._frequencies = None

    def read(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Read tokens and return the logits after the last one.

        Args:
            tokens: int64 [b, s]; s is 1 but in the first call.
            positions: Like `tokens`, counted in each row from its first token, or [1, s] where
                all rows have the same.

        Returns:
            [b, vocabulary] on the ranks of the last stage, None elsewhere.
        """
        assert self._cache is not None, "read is called inside the block of reading"
        if self._frequencies is not None:
            angles = self._frequencies[positions].transpose(0, 1).unsqueeze(2)
            self._cache.turn = Turn.by(angles, DTYPES[self._run.precision])
        hidden: torch.Tensor | None = None
        for chunk in self._chunks:
            if chunk.pre_process:
                hidden = chunk.embedding(tokens, positions.expand_as(tokens))
            elif self._ranks.pp_size > 1:
                hidden = self._receive(tokens.shape)
            for layer in chunk.decoder.layers:
                hidden, _ = layer(hidden, attention_mask=None)
            if not chunk.post_process and self._ranks.pp_size > 1:
                self._send(hidden)
        self._cache.length += tokens.shape[1]
        last = self._chunks[-1]
        return self._logits(last, hidden) if last.post_process else None

    def select_rows(self, rows: torch.Tensor) -> None:
        """Let the cache's row i be what row `rows[i]` was; int64 [new rows], equal on all ranks."""
        assert self._cache is not None, "select_rows is called inside the block of reading"
        self._cache.select_rows(rows)

    def announce(self, message: torch.Tensor) -> torch.Tensor:
        """Return what the last stage says, on every rank of the replica.

        Args:
            message: On the last stage what it says; elsewhere of the same shape and dtype.
        """
        if self._ranks.replica_group.size() > 1:
            dist.broadcast(message, self.source, group=self._ranks.replica_group)
        return message

    def _logits(self, chunk: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        assert hidden is not None
        hidden = hidden[-1:]
        if chunk.decoder.final_layernorm is not None:
            hidden = chunk.decoder.final_layernorm(hidden)
        tied = chunk.share_embeddings_and_output_weights
        weight = chunk.shared_embedding_or_output_weight() if tied else None
        mine, _ = chunk.output_layer(hidden, weight=weight)
        whole: torch.Tensor = gather_from_tensor_model_parallel_region(mine)
        return whole[0, :, : self._run.shape.vocab_size]

    def _rotary_table(self, capacity: int) -> torch.Tensor:
        """Return the angle of each position and pair of channels, fp32 [capacity, channels / 2]."""
        inverse = self._chunks[0].rotary_pos_emb.inv_freq
        places = torch.arange(capacity, device=inverse.device, dtype=inverse.dtype)
        return torch.outer(places, inverse)

    def _send(self, hidden: torch.Tensor | None) -> None:
        """Send activations to the stage that goes on: from the last one, to the first."""
        assert hidden is not None
        stage = (self._ranks.pp_rank + 1) % self._ranks.pp_size
        dist.send(hidden.contiguous(), self._pipeline[stage], group=self._ranks.pp_group)

    def _receive(self, shape: torch.Size) -> torch.Tensor:
        """Return the activations of the stage before, [s, b, hidden]."""
        rows, length = shape
        hidden = torch.empty(
            length,
            rows,
            self._run.shape.hidden_size,
            dtype=DTYPES[self._run.precision],
            device=self._device,
        )
        stage = (self._ranks.pp_rank - 1) % self._ranks.pp_size
        dist.recv(hidden, self._pipeline[stage], group=self._ranks.pp_group)
        return hidden


def can_decode(chunks: list[torch.nn.Module]) -> bool:
    """Say whether `Decoder` takes these chunks: not those of a user's own model provider."""
    return all(type(innermost(chunk)) is GPTChunk for chunk in chunks)


def _cores(chunks: list[Any]) -> Iterator[torch.nn.Module]:
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            core = layer.self_attention.core_attention
            assert isinstance(core, SdpaCoreAttention)
            yield core


@contextmanager
def _evaluating(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Switch dropout and recomputation off inside the block."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _unsplit_sequences(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Switch sequence parallelism off inside the block: one token cannot be split."""
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    switched = [
        (holder, name)
        for holder in (*modules, *configs.values())
        for name in _SEQUENCE_PARALLEL_SWITCHES
        if getattr(holder, name, None) is True
    ]
    try:
        for holder, name in switched:
            setattr(holder, name, False)
        yield
    finally:
        for holder, name in switched:
            setattr(holder, name, True)
