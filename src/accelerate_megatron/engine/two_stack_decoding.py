"""Running a model with an encoder and a decoder: the prompts once, then one token at a time.

The encoder's stages pass the prompts on as in training. What the last of them gives goes to all
stages of the pipeline; those of the decoder keep the keys and values that their layers make of it,
and then work like those of a model without an encoder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron.config.encoder_decoder_rules import stages_of_stacks
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.decoding import Decoder
from accelerate_megatron.engine.groups import Ranks
from accelerate_megatron.engine.kv_cache import KeyValueCache, hiding
from accelerate_megatron.engine.lean_layer import LeanCrossLayer


class TwoStackDecoder(Decoder):
    """This rank's part of a model whose decoder continues from what its encoder made of prompts.

    Rows begin with one token of their own, so `read` takes one token from the first call on, and
    no row is padded. Positions are relative, and follow from the order of the calls.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        run: RunConfig,
        ranks: Ranks,
        device: torch.device,
        *,
        prompts: torch.Tensor,
        is_padding: torch.Tensor,
    ) -> None:
        """Take the one chunk of this stage as it is between two updates.

        Args:
            chunks: This rank's chunk, wrapped; the module inside must be an `EncoderDecoderStage`.
            run: The resolved run.
            ranks: This rank's position.
            device: Where the model computes.
            prompts: What the encoder reads, int64 [b, s].
            is_padding: Bool [b, s], True where a token is none of the prompt's.
        """
        super().__init__(chunks, run, ranks, device)
        self._prompts = prompts
        self._is_padding = is_padding if bool(is_padding.any()) else None
        [self._stage] = self._chunks

    def read(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """As `Decoder.read`, of one token in each row; stages of the encoder have nothing to do."""
        if self._stage.decoder is None:
            return None
        return super().read(tokens, positions)

    def _prepare(self, capacity: int, padding: torch.Tensor | None) -> None:
        """Run the encoder, and make the decoder's cache of what it gives."""
        assert padding is None, "rows of a decoder with an encoder begin with one token each"
        encoded = self._encode()
        cache = KeyValueCache(capacity, self._dtype)
        self._cache = cache
        if self._is_padding is not None:
            cache.source_bias = hiding(self._is_padding, self._dtype)
        if self._stage.decoder is None:
            return
        cache.by_distance = self._stage.decoder_relative_pos_emb.of_last_query(capacity)
        rows = self._prompts.shape[0]
        self._layers = [
            [LeanCrossLayer(layer, cache, encoded, rows) for layer in self._stage.decoder.layers]
        ]

    def _encode(self) -> torch.Tensor:
        """Return what the encoder makes of the prompts, [s x b, hidden], on every stage."""
        stage, ranks = self._stage, self._ranks
        rows, length = self._prompts.shape
        encoded: torch.Tensor | None = None
        if stage.encoder is not None:
            received = None
            if ranks.pp_rank > 0:
                received = self._receive(rows * length).view(length, rows, -1)
            stage.set_input_tensor(received)
            hidden = None if self._is_padding is None else self._is_padding[:, None, None, :]
            encoded = stage.encode(self._prompts, hidden).reshape(length * rows, -1)
            stage.set_input_tensor(None)
        if ranks.pp_size == 1:
            assert encoded is not None
            return encoded
        layout = self._run.layout
        num_encoder_stages, _ = stages_of_stacks(layout.pp_size, layout.split_rank)
        if encoded is not None and ranks.pp_rank < num_encoder_stages - 1:
            self._send(encoded)
        if ranks.pp_rank != num_encoder_stages - 1 or encoded is None:
            encoded = self._empty(rows * length)
        last = self._pipeline[num_encoder_stages - 1]
        dist.broadcast(encoded, last, group=ranks.pp_group)
        return encoded

    def _embeds(self, chunk: Any) -> bool:
        return bool(chunk.starts_decoder)

    def _scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = hidden * self._stage.output_scale
        return scaled

    def _output_weight(self, chunk: Any) -> torch.Tensor:
        weight: torch.Tensor = chunk.output_weight
        return weight
