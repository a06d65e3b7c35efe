"""One chunk of a BERT: Megatron's blocks, Hugging Face's embeddings and heads."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock

from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.cross_entropy import token_losses
from accelerate_megatron.engine.encoder_heads import LanguageHead, Pooler, all_tokens
from accelerate_megatron.engine.encoder_layers import EncoderEmbedding, encoder_block_spec
from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.engine.rotary import inverse_frequencies, row_embeddings

NUM_SENTENCE_ORDERS = 2


class BertChunk(LanguageModule):  # type: ignore[misc]  # megatron is untyped
    """The layers of one pipeline stage, or of one virtual stage, and the heads on the last.

    Not Megatron's own `BertModel`: that has neither norms after the sums nor a choice of heads.
    """

    def __init__(self, run: RunConfig, config: ModelConfig, vp_stage: int | None) -> None:
        """Build the chunk with uninitialised weights; importing writes every one of them.

        Args:
            run: The resolved run, of a model with `shape.encoder`.
            config: `run` in Megatron's terms.
            vp_stage: Index of the chunk on this stage under interleaving, else None.
        """
        super().__init__(config=config)
        shape = run.shape
        assert shape.encoder is not None
        self.kind = shape.encoder
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        self.pre_process = parallel_state.is_pipeline_first_stage(**place)
        self.post_process = parallel_state.is_pipeline_last_stage(**place)
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = shape.tied_embeddings
        self.real_vocab_size = shape.vocab_size
        if self.pre_process:
            self.embedding = EncoderEmbedding(config, shape, run.padded_vocab_size)
        self.frequencies: torch.Tensor | None = None
        if shape.position_embedding == "rope":
            self.frequencies = inverse_frequencies(
                shape.rope_parameters, shape.rotary_channels or shape.kv_channels
            )
        self.encoder = TransformerBlock(
            config=config,
            spec=encoder_block_spec(shape.encoder, config, vp_stage),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        if self.post_process:
            self._build_heads(run, config)
        if self.kind.has_vocabulary_head and (self.pre_process or self.post_process):
            self.setup_embeddings_and_output_layer()
        elif self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True

    def _build_heads(self, run: RunConfig, config: ModelConfig) -> None:
        kind, size = self.kind, config.hidden_size
        if kind.has_pooler:
            self.pooler = Pooler(config)
        if kind.has_vocabulary_head:
            self.lm_head = LanguageHead(config)
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                size,
                run.padded_vocab_size,
                config=config,
                init_method=config.init_method,
                bias=True,
                skip_bias_add=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and run.shape.tied_embeddings,
            )
        if kind.head == "pretraining":
            self.binary_head = torch.nn.Linear(size, NUM_SENTENCE_ORDERS)
        if kind.head == "classification":
            dropout = kind.classifier_dropout
            self.head_dropout = torch.nn.Dropout(
                run.shape.hidden_dropout if dropout is None else dropout
            )
            self.classification_head = torch.nn.Linear(size, kind.num_labels)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take what the stage before has sent, from Megatron's schedule."""
        (received,) = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        self.encoder.set_input_tensor(received)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        tokentype_ids: torch.Tensor | None = None,
        lm_labels: torch.Tensor | None = None,
    ) -> Any:
        """Return hidden states [s, b, h] before the last stage, and on it what the head gives.

        - with a masked language model: (loss per token, fp32 [b, s], sentence logits [b, 2] or
          None); without labels, logits [b, s, padded vocabulary / tp] in the loss's place;
        - with a classifier: logits [b, num_labels];
        - with no head: (hidden states [b, s, h], pooled first token [b, h]).

        Args:
            input_ids: [b, s].
            attention_mask: [b, s], 1 for a real token, 0 for padding; None: all are real.
            tokentype_ids: [b, s]; None: all are of type 0.
            lm_labels: Token ids, [b, s], each in [0, vocab_size).
        """
        embedded = None
        if self.pre_process:
            types = torch.zeros_like(input_ids) if tokentype_ids is None else tokentype_ids
            embedded = self.embedding(input_ids, types)
        hidden = None if attention_mask is None else ~attention_mask.bool()[:, None, None, :]
        states = self.encoder(
            hidden_states=embedded, attention_mask=hidden, rotary_pos_emb=self._angles(input_ids)
        )
        return self._heads(states, lm_labels) if self.post_process else states

    def _angles(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """Return what rotary positions turn each token by, [s, 1, 1, channels]; None without."""
        if self.frequencies is None:
            return None
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return row_embeddings(positions, self.frequencies.to(input_ids.device))

    def _heads(self, states: torch.Tensor, labels: torch.Tensor | None) -> Any:
        kind = self.kind
        whole = all_tokens(states, self.config) if kind.has_pooler else states
        pooled = self.pooler(whole) if kind.has_pooler else None
        if kind.head == "classification":
            return self.classification_head(self.head_dropout(pooled))
        if kind.head == "none":
            return whole.transpose(0, 1).contiguous(), pooled
        sentence_logits = self.binary_head(pooled) if kind.head == "pretraining" else None
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else None
        logits, _ = self.output_layer(self.lm_head(states), weight=weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous(), sentence_logits
        loss = token_losses(
            logits, labels, vocab_size=self.real_vocab_size, tp_group=self.pg_collection.tp
        )
        return loss, sentence_logits

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what Megatron saves; its own method of language models wants an output layer."""
        if self.kind.has_vocabulary_head:
            return super().sharded_state_dict(*args, **kwargs)
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)
