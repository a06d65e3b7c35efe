"""A model with an encoder and a decoder, on the stages of an ordinary 1F1B pipeline.

The first stages hold the encoder's layers, the others the decoder's. Every decoder stage needs
what the encoder gave, so it travels along: behind the decoder's activations, along the sequence,
in the one tensor that Megatron's schedule passes on. The gradient comes back the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

from accelerate_megatron.config.encoder_decoder_rules import stages_of_stacks
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.attention import SdpaCoreAttention
from accelerate_megatron.engine.cross_entropy import token_losses
from accelerate_megatron.engine.linear import DroppingLinear, OutputLinear
from accelerate_megatron.engine.model import layer_spec
from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.engine.norm import Norm
from accelerate_megatron.engine.position_bias import RelativePositionBias
from accelerate_megatron.engine.stage_copies import StageCopies

ENCODER, DECODER, WORDS = "encoder", "decoder", "word embedding"
"""Sets of stages: those with encoder layers, with decoder layers, with the word embedding."""

TensorShapes = list[tuple[int, int, int]]


class EncoderDecoderStage(LanguageModule):  # type: ignore[misc]  # megatron is untyped
    """What one pipeline stage holds of an encoder-decoder model.

    Attributes:
        pre_process: Whether it embeds tokens: the first stage of either stack does.
        post_process: Whether it computes the loss.
        has_peers: Whether there are other stages.
    """

    def __init__(self, run: RunConfig, config: ModelConfig) -> None:
        """Build the stage with uninitialised weights. Every rank calls it.

        Args:
            run: The resolved run, of a model that has an encoder.
            config: `run` in Megatron's terms; its layers are the decoder's.
        """
        super().__init__(config=config)
        layout, shape = run.layout, run.shape
        stage = parallel_state.get_pipeline_model_parallel_rank()
        num_encoder_stages, _ = stages_of_stacks(layout.pp_size, layout.split_rank)
        every = range(layout.pp_size)
        self.has_peers = layout.pp_size > 1
        decoder_start = num_encoder_stages if self.has_peers else 0
        in_encoder, in_decoder = stage < num_encoder_stages, stage >= decoder_start
        self.starts_decoder = stage == decoder_start
        self.pre_process = stage == 0 or self.starts_decoder
        self.post_process = stage == layout.pp_size - 1
        with_words = {0, decoder_start}
        if shape.tied_embeddings:
            with_words.add(layout.pp_size - 1)
        self.copies = StageCopies(
            {
                ENCODER: list(every)[:num_encoder_stages],
                DECODER: list(every)[decoder_start:],
                WORDS: sorted(with_words),
            }
        )
        config.finalize_model_grads_func = self.copies.finalizer()
        self.model_type = ModelType.encoder_or_decoder
        # What Megatron itself would sum up over the first and the last stage.
        self.share_embeddings_and_output_weights = False
        self.vocab_size = shape.vocab_size
        self.output_scale = _encoder_decoder(run).output_scale
        self.output_dropout = shape.hidden_dropout
        self.is_tied = shape.tied_embeddings
        self._input: torch.Tensor | None = None
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config, run.padded_vocab_size, max_sequence_length=0, position_embedding_type="none"
            )
            self.embedding.embedding_dropout.p = shape.embedding_dropout
            self.copies.share(self.embedding.word_embeddings.weight, WORDS)
        self.encoder = self.decoder = None
        if in_encoder:
            self.encoder_relative_pos_emb, self.encoder = self._stack(run, config, ENCODER)
        if in_decoder:
            self.decoder_relative_pos_emb, self.decoder = self._stack(run, config, DECODER)
        if self.post_process:
            self._build_output_layer(run, config)

    def _stack(
        self, run: RunConfig, config: ModelConfig, name: str
    ) -> tuple[RelativePositionBias, TransformerBlock]:
        """Build the position bias and this stage's layers of one stack."""
        settings = _encoder_decoder(run)
        pipeline = self.copies.group(name)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        # Megatron counts layers by the pipeline that they are on: the stack's own stages.
        groups.pp = pipeline
        config = copy.copy(config)
        config.pipeline_model_parallel_size = pipeline.size()
        if name == ENCODER:
            config.num_layers = settings.num_encoder_layers
        num_layers = config.num_layers // pipeline.size()
        layers = [_layer_spec(config, name) for _ in range(num_layers)]
        bias = RelativePositionBias(
            config,
            num_buckets=settings.position_buckets,
            max_distance=settings.max_distance,
            looks_ahead=name == ENCODER,
            tp_group=groups.tp,
        )
        self.copies.share(bias.relative_attention_bias.weight, name)
        block = TransformerBlock(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
            post_process=pipeline.rank() == pipeline.size() - 1,
            pg_collection=groups,
        )
        return bias, block

    def _build_output_layer(self, run: RunConfig, config: ModelConfig) -> None:
        has_words_here = self.is_tied and self.pre_process
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            run.padded_vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=has_words_here,
        )
        if self.is_tied and not has_words_here:
            self.copies.share(self.output_layer.weight, WORDS)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take what the schedule received from the stage before; None on the first stage."""
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        encoder_input_ids: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        encoder_attn_mask: torch.Tensor | None,
        decoder_attn_mask: torch.Tensor | None,
        encoder_decoder_attn_mask: torch.Tensor | None,
        tokentype_ids: None = None,
        lm_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss per token, fp32 [b, t], on the last stage; else what is passed on.

        The arguments are those of Megatron's T5Model. Without labels the last stage returns
        logits, [b, t, padded vocabulary / tp].

        Args:
            encoder_input_ids: [b, s].
            decoder_input_ids: [b, t].
            encoder_attn_mask: Bool, broadcasts to [b, 1, s, s], True = hidden; or None.
            decoder_attn_mask: The same for the decoder, [b, 1, t, t], with its later tokens; None
                hides those alone.
            encoder_decoder_attn_mask: The same for the decoder's look at the encoder, [b, 1, t, s].
            tokentype_ids: Must be None.
            lm_labels: [b, t], each in the vocabulary.
        """
        encoded = self.encode(encoder_input_ids, encoder_attn_mask)
        if self.decoder is None:
            return encoded
        length = decoder_input_ids.shape[1]
        if self.starts_decoder:
            hidden = self._embed(decoder_input_ids)
        else:
            own = length // self._sequence_parts
            hidden, encoded = encoded.split_with_sizes([own, encoded.shape[0] - own])
        if decoder_attn_mask is None:
            ones = torch.ones(length, length, dtype=torch.bool, device=decoder_input_ids.device)
            decoder_attn_mask = ones.triu(1)
        hidden = self.decoder(
            hidden_states=hidden.contiguous(),
            attention_mask=self.decoder_relative_pos_emb(length, decoder_attn_mask),
            context=encoded,
            context_mask=encoder_decoder_attn_mask,
        )
        if not self.post_process:
            return torch.cat([hidden, encoded])
        return self._output(hidden, lm_labels)

    def encode(self, ids: torch.Tensor, hidden_keys: torch.Tensor | None) -> torch.Tensor:
        """Return what this stage's encoder layers give, or what was received without any.

        Args:
            ids: [b, s].
            hidden_keys: Bool, broadcasts to [b, 1, s, s], True = hidden; or None.

        Returns:
            [s, b, hidden]; s is this rank's part under sequence parallelism.
        """
        if self.encoder is None:
            assert self._input is not None
            return self._input
        received = self._embed(ids) if self._input is None else self._input
        encoded: torch.Tensor = self.encoder(
            hidden_states=received,
            attention_mask=self.encoder_relative_pos_emb(ids.shape[1], hidden_keys),
        )
        return encoded if self.encoder.final_layernorm is None else self._drop(encoded)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(input_ids=ids, position_ids=None)
        return embedded

    def _output(self, hidden: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        hidden = self._drop(hidden) * self.output_scale
        weight = self.output_weight if self._has_words_for_output else None
        logits, _ = self.output_layer(hidden, weight=weight)
        if labels is None:
            whole: torch.Tensor = logits.transpose(0, 1).contiguous()
            return whole
        return token_losses(
            logits, labels, vocab_size=self.vocab_size, tp_group=self.pg_collection.tp
        )

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, [padded vocabulary / tp, hidden]; last stage."""
        words = self.embedding.word_embeddings if self._has_words_for_output else self.output_layer
        weight: torch.Tensor = words.weight
        return weight

    @property
    def _has_words_for_output(self) -> bool:
        return self.is_tied and self.pre_process

    @property
    def _sequence_parts(self) -> int:
        return self.pg_collection.tp.size() if self.config.sequence_parallel else 1

    def _drop(self, hidden: torch.Tensor) -> torch.Tensor:
        """Drop some of what a stack gives; sequence-parallel ranks drop of their own tokens."""
        if not self.training or not self.output_dropout:
            return hidden
        if not self.config.sequence_parallel:
            return F.dropout(hidden, self.output_dropout)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(hidden, self.output_dropout)

    def message_shapes(
        self, encoder_length: int, decoder_length: int
    ) -> Callable[[TensorShapes, TensorShapes], tuple[TensorShapes, TensorShapes]]:
        """Return Megatron's `adjust_tensor_shapes_fn` for rows of these lengths.

        An encoder stage sends the encoder's tokens, a decoder stage those of both.
        """
        received = sent = encoder_length
        if self.decoder is not None:
            sent += decoder_length
            received += 0 if self.starts_decoder else decoder_length

        def adjust(
            receives: TensorShapes, sends: TensorShapes
        ) -> tuple[TensorShapes, TensorShapes]:
            return self._with_length(receives, received), self._with_length(sends, sent)

        return adjust

    def _with_length(self, shapes: TensorShapes, length: int) -> TensorShapes:
        parts = self._sequence_parts
        return [(length // parts, rows, channels) for _, rows, channels in shapes]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return this stage's entries; copies of one parameter have one name and numbers."""
        # Not LanguageModule's own, which ties over the first and the last stage alone.
        state: dict[str, Any] = super(LanguageModule, self).sharded_state_dict(
            prefix, sharded_offsets, metadata
        )
        words = f"{prefix}embedding.word_embeddings.weight"
        output = f"{prefix}output_layer.weight"
        if self.is_tied and output in state:
            # On a stage that embeds too, the output layer holds no weight of its own.
            state[output].key = words
            state[output] = self.copies.entry(state[output], WORDS)
        if output in state:
            state[output].allow_shape_mismatch = True
        if words in state:
            state[words].allow_shape_mismatch = True
            state[words] = self.copies.entry(state[words], WORDS)
        for stack in (ENCODER, DECODER):
            bias = f"{prefix}{stack}_relative_pos_emb.relative_attention_bias.weight"
            if bias in state:
                state[bias] = self.copies.entry(state[bias], stack)
        return state


def _encoder_decoder(run: RunConfig) -> Any:
    return run.shape.encoder_decoder


def _layer_spec(config: ModelConfig, stack: str) -> ModuleSpec:
    """Return the layer spec of a decoder-only model, for an encoder or with cross attention."""
    layer = layer_spec(config, is_causal=stack != ENCODER)
    layer.submodules.mlp = _with_dropping_linear(layer.submodules.mlp)
    if stack == ENCODER:
        return layer
    layer.submodules.pre_cross_attn_layernorm = Norm
    layer.submodules.cross_attention = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=SdpaCoreAttention,
            linear_proj=OutputLinear,
        ),
    )
    layer.submodules.cross_attn_bda = get_bias_dropout_add
    return layer


def _with_dropping_linear(mlp: Any) -> Any:
    """Put our second linear layer into the spec of an MLP; newer versions give a partial."""
    submodules = mlp.keywords["submodules"] if hasattr(mlp, "keywords") else mlp.submodules
    submodules.linear_fc2 = DroppingLinear
    return mlp
