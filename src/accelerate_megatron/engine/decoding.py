"""Running a model one token at a time, over its pipeline stages.

Not through GPTModel: positions differ by row where prompts are padded, only the last token needs
logits, and the stages send each other what they compute without a schedule. Nor through Megatron's
layers: see `lean_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.cpu_products import LinearProduct
from accelerate_megatron.engine.encoder_decoder import EncoderDecoderStage
from accelerate_megatron.engine.groups import Ranks
from accelerate_megatron.engine.kv_cache import KeyValueCache, Turn
from accelerate_megatron.engine.lean_layer import LeanCrossLayer, LeanLayer
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
        self._run = run
        self._ranks = ranks
        self._device = device
        self._dtype = DTYPES[run.precision]
        self._pipeline = dist.get_process_group_ranks(ranks.pp_group)
        members = ranks.all_replicas[ranks.dp_rank]
        self.source = members[-(len(members) // ranks.pp_size)]
        self._cache: KeyValueCache | None = None
        self._layers: list[list[LeanLayer] | list[LeanCrossLayer]] = []
        self._output: LinearProduct | None = None
        self._turns: Turn | None = None

    @contextmanager
    def reading(self, capacity: int, padding: torch.Tensor | None) -> Iterator[None]:
        """Hold a cache inside the block; afterwards the model trains on as if nothing had been.

        Args:
            capacity: Tokens of a row, padding included, that the cache has room for.
            padding: Bool [b, s], True before a row's first token, or None.
        """
        finish_parameter_gather(self._wrapped)
        modules = [module for chunk in self._chunks for module in chunk.modules()]
        with (
            torch.no_grad(),
            _evaluating(modules),
            _unsplit_sequences(modules),
            lean_linear_layers(modules),
            wide_products(self._chunks),
        ):
            try:
                self._prepare(capacity, padding)
                yield
            finally:
                self._cache, self._layers, self._turns, self._output = None, [], None, None

    def _prepare(self, capacity: int, padding: torch.Tensor | None) -> None:
        """Make an empty cache, and the layers that fill it."""
        cache = KeyValueCache(capacity, self._dtype, padding=padding)
        self._cache = cache
        self._layers = [
            [LeanLayer(layer, cache) for layer in chunk.decoder.layers] for chunk in self._chunks
        ]
        if self._run.shape.position_embedding == "rope":
            frequencies = self._chunks[0].rotary_pos_emb.inv_freq
            self._turns = Turn.table(frequencies, capacity, self._dtype)

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
        self._cache.begin(tokens.shape[1])
        if self._turns is not None:
            self._cache.turn = self._turns.at(positions)
        rows = tokens.shape[0]
        hidden: torch.Tensor | None = None
        for chunk, layers in zip(self._chunks, self._layers, strict=True):
            if self._embeds(chunk):
                hidden = _embed(chunk.embedding, tokens, positions)
            elif self._ranks.pp_size > 1:
                hidden = self._receive(tokens.numel())
            assert hidden is not None
            for layer in layers:
                hidden = layer(hidden, rows)
            if chunk.post_process:
                return self._logits(chunk, hidden[-rows:])
            self._send(hidden)
        return None

    def _embeds(self, chunk: Any) -> bool:
        """Say whether the decoder's first layer is this chunk's."""
        return bool(chunk.pre_process)

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

    def _logits(self, chunk: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return [b, vocabulary], from what the last layer gives of the last token, [b, hidden]."""
        if chunk.decoder.final_layernorm is not None:
            hidden = chunk.decoder.final_layernorm(hidden)
        if self._output is None:
            self._output = LinearProduct(self._output_weight(chunk), None)
        mine = self._output(self._scaled(hidden))
        whole = mine
        if self._ranks.tp_group.size() > 1:
            whole = gather_from_tensor_model_parallel_region(mine)
        return whole[:, : self._run.shape.vocab_size]

    def _scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what goes into the output layer."""
        return hidden

    def _output_weight(self, chunk: Any) -> torch.Tensor:
        """Return this rank's rows of the output layer, [padded vocabulary / tp, hidden]."""
        if chunk.share_embeddings_and_output_weights:
            weight: torch.Tensor = chunk.shared_embedding_or_output_weight()
        else:
            weight = chunk.output_layer.weight
        return weight

    def _send(self, hidden: torch.Tensor) -> None:
        """Send activations to the stage that goes on: from the last one, to the first."""
        stage = (self._ranks.pp_rank + 1) % self._ranks.pp_size
        dist.send(hidden.contiguous(), self._pipeline[stage], group=self._ranks.pp_group)

    def _receive(self, num_tokens: int) -> torch.Tensor:
        """Return the activations of the stage before, [num_tokens, hidden]."""
        hidden = self._empty(num_tokens)
        stage = (self._ranks.pp_rank - 1) % self._ranks.pp_size
        dist.recv(hidden, self._pipeline[stage], group=self._ranks.pp_group)
        return hidden

    def _empty(self, num_tokens: int) -> torch.Tensor:
        size = (num_tokens, self._run.shape.hidden_size)
        return torch.empty(size, dtype=self._dtype, device=self._device)


def _embed(embedding: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return what the first layer is given, [s x b, hidden], of tokens [b, s]."""
    hidden: torch.Tensor = embedding.word_embeddings(tokens.t().reshape(-1))
    if embedding.add_position_embedding:
        places = positions.expand_as(tokens).t().reshape(-1)
        hidden = hidden + F.embedding(places, embedding.position_embeddings.weight)
    return hidden


def can_decode(chunks: list[torch.nn.Module]) -> bool:
    """Say whether these chunks can be decoded: not those of a user's own model provider."""
    kinds = (GPTChunk, EncoderDecoderStage)
    return all(type(innermost(chunk)) in kinds for chunk in chunks)


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
