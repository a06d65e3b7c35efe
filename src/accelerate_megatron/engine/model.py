"""One model chunk: Megatron's GPTModel with our attention, norm, loss and positions."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.attention import SdpaCoreAttention
from accelerate_megatron.engine.context_parallel import take_slice
from accelerate_megatron.engine.cross_entropy import token_losses
from accelerate_megatron.engine.experts import use_experts
from accelerate_megatron.engine.latent_attention import use_latent_attention
from accelerate_megatron.engine.linear import OutputLinear, QKVLinear
from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.engine.norm import Norm
from accelerate_megatron.engine.rotary import inverse_frequencies, row_embeddings


class GPTChunk(GPTModel):  # type: ignore[misc]  # megatron is untyped
    """The layers of one pipeline stage, or of one virtual stage."""

    def __init__(self, run: RunConfig, config: ModelConfig, vp_stage: int | None) -> None:
        """Build the chunk with uninitialised weights; importing writes every one of them.

        Args:
            run: The resolved run.
            config: `run` in Megatron's terms.
            vp_stage: Index of the chunk on this stage under interleaving, else None.
        """
        shape = run.shape
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        assert shape.max_positions is not None
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(run, config, vp_stage),
            vocab_size=run.padded_vocab_size,
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type=shape.position_embedding,
            vp_stage=vp_stage,
        )
        self.real_vocab_size = shape.vocab_size
        if self.pre_process:
            # Megatron has one hidden_dropout; the embedding's may differ from it.
            self.embedding.embedding_dropout.p = shape.embedding_dropout
        if shape.position_embedding == "rope":
            device = self.rotary_pos_emb.inv_freq.device
            self.rotary_pos_emb.inv_freq = inverse_frequencies(
                shape.rope_parameters, shape.rotary_channels or shape.kv_channels
            ).to(device)

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Return what Megatron's does, with rotary positions as `position_ids` has them.

        Megatron counts them from 0 in every row, which is wrong where samples are packed.
        """
        made: tuple[Any, ...] = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        if made[1] is None or position_ids is None or self._are_counted(position_ids):
            return made
        return (made[0], row_embeddings(position_ids, self.rotary_pos_emb.inv_freq), *made[2:])

    def _are_counted(self, position_ids: torch.Tensor) -> bool:
        """Say whether this rank's positions, [b, s], are 0, 1, 2, ... of the whole sequence."""
        if position_ids.stride(0) == 0 and position_ids.shape[0] > 1:
            position_ids = position_ids[:1]
        size = self.config.context_parallel_size
        counted = torch.arange(position_ids.shape[1] * size, device=position_ids.device)
        if size > 1:
            counted = take_slice(counted, dim=0, rank=self.pg_collection.cp.rank(), size=size)
        return bool((position_ids == counted).all())

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss per token, fp32 [b, s].

        Args:
            labels: Token ids, [b, s].
            logits: This rank's columns, [s, b, padded vocabulary / tp].
        """
        return token_losses(
            logits, labels, vocab_size=self.real_vocab_size, tp_group=self.pg_collection.tp
        )


def _block_spec(
    run: RunConfig, config: ModelConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of one chunk, dense ones and those with experts."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = []
    for index in range(first, first + num_layers):
        layer = layer_spec(config)
        if run.shape.has_experts(index):
            use_experts(layer.submodules, run.experts)
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def layer_spec(config: ModelConfig, *, is_causal: bool = True) -> ModuleSpec:
    """Return Megatron's local layer spec with our core attention and norm in it.

    Args:
        config: Megatron's configuration.
        is_causal: Whether a token sees none to its right; an encoder's see all.
    """
    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    if not is_causal:
        params = layer.submodules.self_attention.params
        layer.submodules.self_attention.params = {**params, "attn_mask_type": AttnMaskType.padding}
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    attention.core_attention = SdpaCoreAttention
    attention.linear_qkv = QKVLinear
    attention.linear_proj = OutputLinear
    if config.latent is not None:
        use_latent_attention(layer)
    if config.qk_layernorm:
        attention.q_layernorm = Norm
        attention.k_layernorm = Norm
    return layer
