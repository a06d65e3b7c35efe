"""`T5TrainStep`: batches and loss of encoder-decoder models, as Hugging Face means them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers.modeling_outputs import Seq2SeqLMOutput

from accelerate_megatron.data.collate import IGNORED_LABEL
from accelerate_megatron.training.gpt import token_loss
from accelerate_megatron.training.train_step import (
    AbstractTrainStep,
    BatchFunction,
    ForwardStepFunction,
    LossFunction,
    accelerator_and_args,
)

T5Batch = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    "torch.Tensor | None",
    torch.Tensor,
    "torch.Tensor | None",
]
"""Encoder tokens [b, s], decoder tokens, loss mask and labels [b, t]; three masks, True = hidden.

The masks are the encoder's, the decoder's and that of the decoder's look at the encoder, which
broadcast to [b, 1, queries, keys]; None hides nothing.
"""


class T5TrainStep(AbstractTrainStep):
    """The train step of T5 and mT5.

    Subclass it to change one of its three functions; each `get_*` method is called once,
    at construction.
    """

    batch_keys: tuple[str, ...] | None = (
        "input_ids",
        "attention_mask",
        "decoder_input_ids",
        "decoder_attention_mask",
        "labels",
    )
    model_output_class = Seq2SeqLMOutput

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        """Build the functions from the methods, or take the plugin's custom ones.

        Args:
            accelerator: The `Accelerator`; its plugin may hold `custom_get_batch_function`
                and `custom_loss_function`. A subclass may pass its `args` here instead.
            args: The run's settings, of which `decoder_start_token_id` and `pad_token_id` are
                read.
        """
        super().__init__("T5TrainStep")
        accelerator, args = accelerator_and_args(accelerator, args)
        self.decoder_start_token_id: Any = getattr(args, "decoder_start_token_id", None)
        self.pad_token_id: Any = getattr(args, "pad_token_id", None)
        if None in (self.decoder_start_token_id, self.pad_token_id):
            # Nothing to make them of; a batch without them is refused where it is fetched.
            self.required_keys = ("input_ids", "labels", "decoder_input_ids")
        self._take_functions(accelerator)

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return a Hugging Face mask [b, s] as hidden keys, bool [b, 1, 1, s], True = hidden."""
        return ~attention_mask.bool()[:, None, None, :]

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> torch.Tensor:
        """Return the causal mask, bool [1, 1, t, t], True = hidden."""
        ones = torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool, device=device)
        return ones.triu(1)

    @staticmethod
    def get_enc_dec_mask(
        attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device | str
    ) -> torch.Tensor:
        """Return what the decoder must not see of the encoder, bool [b, 1, t, s], True = hidden."""
        hidden = ~attention_mask.to(device).bool()[:, None, None, :]
        return hidden.expand(-1, -1, dec_seq_length, -1)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> BatchFunction:
        """Return the function that turns the next micro-batch into a `T5Batch`."""

        def get_batch(data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> T5Batch:
            return self.t5_batch(next(data_iterator))

        return get_batch

    def get_loss_func(self, accelerator: Any) -> LossFunction:
        """Return the function that sums the losses of the tokens that count."""
        return token_loss

    def get_forward_step_func(self) -> ForwardStepFunction:
        """Return the function that runs a stage and binds the loss function to the mask."""

        def forward_step(
            data_iterator: Iterator[Mapping[str, torch.Tensor]], model: torch.nn.Module
        ) -> tuple[torch.Tensor, LossFunction]:
            tokens_enc, tokens_dec, loss_mask, labels, *masks = self.get_batch(data_iterator)
            output = model(tokens_enc, tokens_dec, *masks, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    def t5_batch(self, batch: Mapping[str, torch.Tensor]) -> T5Batch:
        """Return Megatron's form of a Hugging Face micro-batch.

        Labels stand at the token that predicts them, as they do in Hugging Face's encoder-decoder
        models: the decoder reads them one place later, behind the start token, unless the batch
        says what it reads.
        """
        labels = batch["labels"]
        tokens_dec = batch.get("decoder_input_ids")
        if tokens_dec is None:
            tokens_dec = self.shift_right(labels)
        loss_mask = labels != IGNORED_LABEL
        length, device = labels.shape[1], labels.device
        attention_mask = batch.get("attention_mask")
        hidden = hidden_from_decoder = None
        if attention_mask is not None and not attention_mask.all():
            hidden = self.attn_mask_postprocess(attention_mask)
            hidden_from_decoder = self.get_enc_dec_mask(attention_mask, length, device)
        decoder_hidden = self.get_decoder_mask(length, device)
        decoder_mask = batch.get("decoder_attention_mask")
        if decoder_mask is not None and not decoder_mask.all():
            decoder_hidden = decoder_hidden | self.attn_mask_postprocess(decoder_mask)
        return (
            batch["input_ids"],
            tokens_dec,
            loss_mask.float(),
            labels.masked_fill(~loss_mask, 0),
            hidden,
            decoder_hidden,
            hidden_from_decoder,
        )

    def shift_right(self, labels: torch.Tensor) -> torch.Tensor:
        """Return what the decoder reads when it is to write `labels`, [b, t]."""
        shifted = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=self.decoder_start_token_id)
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.pad_token_id)


def stack_lengths(batch: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return the tokens of a row of a batch, the encoder's and the decoder's."""
    of_decoder = batch["labels"] if "labels" in batch else batch["decoder_input_ids"]
    return batch["input_ids"].shape[1], of_decoder.shape[1]
