"""Layers and embeddings of encoders, with norms before or after attention and MLP."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from accelerate_megatron.engine.model import layer_spec
from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.engine.norm import Norm
from accelerate_megatron.models.encoder import Encoder
from accelerate_megatron.models.shape import ModelShape


class PostNormLayer(TransformerLayer):  # type: ignore[misc]  # megatron is untyped
    """A layer whose norms stand after the residual sums; Megatron has none of that kind."""

    def __init__(self, config: ModelConfig, *args: Any, **kwargs: Any) -> None:
        """Take what Megatron's `TransformerBlock` gives a layer."""
        super().__init__(config, *args, **kwargs)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_self_attn_layernorm = Norm(config, size, eps)
        self.post_mlp_layernorm = Norm(config, size, eps)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states, context = super()._forward_attention(*args, **kwargs)
        return self.post_self_attn_layernorm(hidden_states), context

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        return self.post_mlp_layernorm(super()._forward_mlp(*args, **kwargs))


class EncoderEmbedding(LanguageModelEmbedding):  # type: ignore[misc]  # megatron is untyped
    """The sum of word, token-type and position embeddings, normalised where `norm_after` is."""

    def __init__(self, config: ModelConfig, shape: ModelShape, rows: int) -> None:
        """Build it.

        Args:
            config: Megatron's configuration.
            shape: An encoder.
            rows: Rows of the padded vocabulary.
        """
        assert shape.encoder is not None
        super().__init__(
            config=config,
            vocab_size=rows,
            max_sequence_length=shape.max_positions,
            position_embedding_type=shape.position_embedding,
            num_tokentypes=shape.encoder.token_types,
        )
        self.layer_norm: torch.nn.Module | None = None
        if shape.encoder.norm_after:
            self.layer_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        # Megatron has one hidden_dropout; the embedding's may differ from it.
        self.embedding_dropout.p = shape.embedding_dropout

    def forward(self, input_ids: torch.Tensor, tokentype_ids: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h], or this rank's part of s under sequence parallelism.

        Args:
            input_ids: [b, s].
            tokentype_ids: [b, s].
        """
        embeddings = self.word_embeddings(input_ids) + self.tokentype_embeddings(tokentype_ids)
        if self.add_position_embedding:  # unless queries and keys are turned instead
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            embeddings = embeddings + self.position_embeddings(positions)
        embeddings = embeddings.transpose(0, 1).contiguous()
        if not self.config.sequence_parallel:
            return self.embedding_dropout(self._normalised(embeddings))  # type: ignore[no-any-return]
        embeddings = tensor_parallel.scatter_to_sequence_parallel_region(
            embeddings, group=self.tp_group
        )
        with tensor_parallel.get_cuda_rng_tracker().fork():  # each rank has other tokens
            return self.embedding_dropout(self._normalised(embeddings))  # type: ignore[no-any-return]

    def _normalised(self, embeddings: torch.Tensor) -> torch.Tensor:
        if self.layer_norm is None:
            return embeddings
        normalised: torch.Tensor = self.layer_norm(embeddings)
        return normalised


def encoder_block_spec(
    encoder: Encoder, config: ModelConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of one chunk of an encoder, and of its last norm."""
    number = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[_encoder_layer_spec(encoder, config) for _ in range(number)],
        layer_norm=None if encoder.norm_after else Norm,
    )


def _encoder_layer_spec(encoder: Encoder, config: ModelConfig) -> ModuleSpec:
    layer = layer_spec(config, is_causal=False)
    if encoder.norm_after:
        layer.module = PostNormLayer
        layer.submodules.input_layernorm = IdentityOp
        layer.submodules.pre_mlp_layernorm = IdentityOp
    return layer
