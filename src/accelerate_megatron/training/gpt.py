"""`GPTTrainStep`: batches and loss of decoder-only models, as Hugging Face means them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from accelerate_megatron.data.collate import IGNORED_LABEL
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.training.train_step import (
    AbstractTrainStep,
    BatchFunction,
    ForwardStepFunction,
    LossFunction,
    accelerator_and_args,
)

GPTBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor]
"""tokens, labels, loss mask [b, s]; attention mask [b, 1, s, s] or None; positions [b, s]."""


class GPTTrainStep(AbstractTrainStep):
    """The train step of GPT-2, Llama and their kin.

    Subclass it to change one of its three functions; each `get_*` method is called once,
    at construction.
    """

    batch_keys: tuple[str, ...] | None = (
        "input_ids",
        "labels",
        "shift_labels",
        "attention_mask",
        "position_ids",
        "seq_idx",
    )
    splits_sequences = True

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        """Build the functions from the methods, or take the plugin's custom ones.

        Args:
            accelerator: The `Accelerator`; its plugin may hold `custom_get_batch_function`
                and `custom_loss_function`. A subclass may pass its `args` here instead.
            args: The run's settings; only `eos_token_id` is read.
        """
        super().__init__("GPTTrainStep")
        accelerator, args = accelerator_and_args(accelerator, args)
        self._eod_token = getattr(args, "eos_token_id", None)
        self._take_functions(accelerator)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> BatchFunction:
        """Return the function that turns the next micro-batch into a `GPTBatch`."""
        masks_eod = accelerator.state.megatron_lm_plugin.eod_mask_loss
        if masks_eod and self._eod_token is None:
            raise ConfigurationError(
                f"eod_mask_loss is set, but {self.name} was built without args, which know the "
                "end-of-document token. Pass them on: super().__init__(accelerator, args)."
            )
        eod_token = self._eod_token if masks_eod else None

        def get_batch(data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> GPTBatch:
            return gpt_batch(next(data_iterator), eod_token)

        return get_batch

    def get_loss_func(self, accelerator: Any) -> LossFunction:
        """Return the function that sums the losses of the tokens that count."""
        return token_loss

    def get_forward_step_func(self) -> ForwardStepFunction:
        """Return the function that runs a chunk and binds the loss function to the mask."""

        def forward_step(
            data_iterator: Iterator[Mapping[str, torch.Tensor]], model: torch.nn.Module
        ) -> tuple[torch.Tensor, LossFunction]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


def gpt_batch(batch: Mapping[str, torch.Tensor], eod_token: int | None = None) -> GPTBatch:
    """Return Megatron's form of a Hugging Face micro-batch.

    Hugging Face's labels stand at their own token and are shifted inside the model's loss;
    Megatron's stand at the token that predicts them, as `shift_labels` do where a batch has them.
    Of labels alone, the last token predicts nothing.

    Args:
        batch: Tensors [b, s]. Where a row holds several packed samples, `seq_idx` numbers the
            sample of each token; without it and without attention_mask, a position that does not
            follow the one before it begins a sample, as in transformers.
        eod_token: The end-of-document token, if predictions made at it do not count.
    """
    tokens, shifted = batch["input_ids"], batch.get("shift_labels")
    if shifted is None:
        shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    if eod_token is not None:
        shifted = shifted.masked_fill(tokens == eod_token, IGNORED_LABEL)
    loss_mask = shifted != IGNORED_LABEL
    position_ids = batch.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return (
        tokens,
        shifted.masked_fill(~loss_mask, 0),
        loss_mask.float(),
        gpt_attention_mask(batch, loss_mask),
        position_ids,
    )


def gpt_attention_mask(
    batch: Mapping[str, torch.Tensor], counts: torch.Tensor
) -> torch.Tensor | None:
    """Return what each token must not look at, bool [b, 1, s, s]; None: the causal mask will do.

    Args:
        batch: As in `gpt_batch`.
        counts: Where the loss counts, bool [b, s].
    """
    mask = causal_padding_mask(batch.get("attention_mask"), counts)
    sequences = packed_sequences(batch)
    if sequences is None:
        return mask
    others = sequences[:, None, :, None] != sequences[:, None, None, :]
    if mask is not None:
        # A token always sees itself: a softmax over nothing is NaN, also where no loss counts.
        itself = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
        return (mask | others) & ~itself
    length = sequences.shape[1]
    return others | torch.ones(length, length, dtype=torch.bool, device=others.device).triu(1)


def packed_sequences(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return which packed sample each token belongs to, [b, s]; None if each row is one."""
    numbers = batch.get("seq_idx")
    if numbers is None:
        positions = batch.get("position_ids")
        if positions is None or batch.get("attention_mask") is not None:
            return None
        breaks = positions[:, 1:] != positions[:, :-1] + 1
        numbers = torch.nn.functional.pad(breaks.long().cumsum(1), (1, 0))
    return numbers if (numbers != numbers[:, :1]).any() else None


def causal_padding_mask(
    attention_mask: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor | None:
    """Return the causal mask with padding keys hidden, bool [b, 1, s, s], True = hidden.

    None where the causal mask alone gives the same loss, which is faster: nothing is
    padded, or all padding is on the right and predicts nothing that counts. No real token
    looks to its right.

    Args:
        attention_mask: Hugging Face's, [b, s], 1 for a real token, 0 for padding.
        counts: Where the loss counts, bool [b, s].
    """
    if attention_mask is None:
        return None
    is_real = attention_mask.bool()
    is_right_padded = not (is_real[:, 1:] & ~is_real[:, :-1]).any()
    if is_right_padded and not (counts & ~is_real).any():
        return None
    length = is_real.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=is_real.device).triu(1)
    return future | ~is_real[:, None, None, :]


def token_loss(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a micro-batch, its number of tokens, and both as a report.

    Sum and count stay apart, so that the mean can be taken once, over the global batch.

    Args:
        loss_mask: 1.0 where a token counts, [b, s].
        output_tensor: Loss per token, [b, s].
    """
    total = (output_tensor.float() * loss_mask).sum()
    count = loss_mask.sum()
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}
