"""`BertTrainStep`: batches and losses of encoders, as Hugging Face means them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.models.megatron_bert.modeling_megatron_bert import (
    MegatronBertForPreTrainingOutput,
)
from transformers.utils.generic import ModelOutput

from accelerate_megatron.data.collate import IGNORED_LABEL
from accelerate_megatron.data.row_labels import RowLabels, problem_type_of
from accelerate_megatron.errors import ConfigurationError, TrainingLoopError
from accelerate_megatron.training.gpt import token_loss
from accelerate_megatron.training.train_step import (
    AbstractTrainStep,
    BatchFunction,
    ForwardStepFunction,
    LossFunction,
    accelerator_and_args,
)

BertBatch = tuple[
    torch.Tensor,
    "torch.Tensor | None",
    "torch.Tensor | None",
    "torch.Tensor | None",
    torch.Tensor,
    "torch.Tensor | None",
]
"""tokens, token types, sentence orders [b], loss mask, labels, attention mask; [b, s] each.

Token types and attention mask are None where all are 0 or all 1; the labels of a classifier are
[b] or [b, n], and it has no loss mask.
"""

_OUTPUTS: dict[str, type[ModelOutput]] = {
    "none": BaseModelOutputWithPooling,
    "masked_lm": MaskedLMOutput,
    "pretraining": BertForPreTrainingOutput,
    "classification": SequenceClassifierOutput,
}
_TOKEN_KEYS = ("input_ids", "labels", "attention_mask", "token_type_ids")


class BertTrainStep(AbstractTrainStep):
    """The train step of BERT and Megatron's BERT: what it learns is the model's head.

    Subclass it to change one of its three functions; each `get_*` method is called once,
    at construction.
    """

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        """Build the functions from the methods, or take the plugin's custom ones.

        Args:
            accelerator: The `Accelerator`; its plugin may hold `custom_get_batch_function`
                and `custom_loss_function`. A subclass may pass its `args` here instead.
            args: The run's settings: `pretraining_flag` (whether tokens are predicted),
                `bert_binary_head` (whether the order of sentences is, too), `num_labels`,
                `problem_type` and `bert_head`.
        """
        super().__init__("BertTrainStep")
        accelerator, args = accelerator_and_args(accelerator, args)
        if args is None:
            raise ConfigurationError(
                "The train step got no args. A custom_train_step_class is given (accelerator, "
                "args), or args alone; hand them on to super().__init__."
            )
        self.head: str = args.bert_head
        self._labels = RowLabels(num_labels=args.num_labels, problem_type=args.problem_type)
        self._is_per_token = accelerator.state.megatron_lm_plugin.calculate_per_token_loss
        self._counts: tuple[float, float] | None = None
        self.model_output_class = _OUTPUTS[self.head]
        if self.head == "pretraining" and args.model_type_name == "megatron-bert":
            self.model_output_class = MegatronBertForPreTrainingOutput
        extra = ("next_sentence_label",) if self.head == "pretraining" else ()
        self.batch_keys = (*_TOKEN_KEYS, *extra)
        self.required_keys = ("input_ids", "labels", *extra)
        self._take_functions(
            accelerator,
            of_loss=(args.pretraining_flag, args.num_labels),
            of_step=(args.pretraining_flag, args.bert_binary_head),
        )

    def begin(
        self,
        batch: Mapping[str, torch.Tensor],
        sum_over_replicas: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Count tokens and sentences of the global batch: their losses have means of their own.

        Raises:
            TrainingLoopError: The model has no head, and so no loss.
        """
        if self.head == "none":
            raise TrainingLoopError(
                "The prepared model is an encoder without a head, which has no loss. Prepare a "
                "model with one, such as BertForMaskedLM or BertForSequenceClassification."
            )
        self._counts = None
        if self._is_per_token and {"labels", "next_sentence_label"} <= batch.keys():
            counts = [
                (batch[key] != IGNORED_LABEL).sum() for key in ("labels", "next_sentence_label")
            ]
            tokens, sentences = sum_over_replicas(torch.stack(counts).double()).tolist()
            self._counts = tokens, sentences

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> BatchFunction:
        """Return the function that turns the next micro-batch into a `BertBatch`."""

        def get_batch(data_iterator: Iterator[Mapping[str, torch.Tensor]]) -> BertBatch:
            return bert_batch(next(data_iterator), is_per_token=self.head != "classification")

        return get_batch

    # Subclasses override these with the parameters they document, which the base class has not.
    def get_loss_func(
        self, accelerator: Any, pretraining_flag: bool = True, num_labels: int = 2
    ) -> LossFunction:
        """Return the function that sums a micro-batch's losses; see `pretraining_loss`."""
        if pretraining_flag:
            return self._pretraining_loss
        return partial(
            classification_loss,
            RowLabels(num_labels=num_labels, problem_type=self._labels.problem_type),
        )

    def get_forward_step_func(
        self, pretraining_flag: bool = True, bert_binary_head: bool = False
    ) -> ForwardStepFunction:
        """Return the function that runs a chunk and binds the loss function to the labels."""

        def forward_step(
            data_iterator: Iterator[Mapping[str, torch.Tensor]], model: torch.nn.Module
        ) -> tuple[Any, LossFunction]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            if not pretraining_flag:
                output = model(tokens, padding_mask, tokentype_ids=types)
                return output, partial(self.loss_func, labels)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, order)

        return forward_step

    def _pretraining_loss(
        self, loss_mask: torch.Tensor, sentence_order: torch.Tensor | None, output_tensor: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        return pretraining_loss(loss_mask, sentence_order, output_tensor, counts=self._counts)


def bert_batch(batch: Mapping[str, torch.Tensor], *, is_per_token: bool) -> BertBatch:
    """Return the parts of a Hugging Face micro-batch.

    Args:
        batch: The micro-batch.
        is_per_token: Whether there is a label for each token, not for each row.
    """
    mask, labels = batch.get("attention_mask"), batch["labels"]
    loss_mask = None
    if is_per_token:
        counts = labels != IGNORED_LABEL
        loss_mask, labels = counts.float(), labels.masked_fill(~counts, 0)
    return (
        batch["input_ids"],
        batch.get("token_type_ids"),
        batch.get("next_sentence_label"),
        loss_mask,
        labels,
        None if mask is None or mask.bool().all() else mask,
    )


def pretraining_loss(
    loss_mask: torch.Tensor,
    sentence_order: torch.Tensor | None,
    output_tensor: Any,
    *,
    counts: tuple[float, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum, count, report) of a micro-batch's masked language model and sentence order.

    Hugging Face's loss is the mean over tokens plus the mean over sentences. As one sum over one
    count: a sentence weighs as many tokens as the batch has for each sentence.

    Args:
        loss_mask: 1.0 where a token counts, [b, s].
        sentence_order: 0 or 1 for each row, or -100, [b]; None without that head.
        output_tensor: Loss per token [b, s], and the sentence logits [b, 2] or None.
        counts: Tokens and sentences that count in the global batch; None: the micro-batch's own.
    """
    token_losses, sentence_logits = output_tensor
    if sentence_logits is None or sentence_order is None:
        return token_loss(loss_mask, token_losses)
    order = sentence_order.reshape(-1)
    tokens, sentences = loss_mask.sum(), (order != IGNORED_LABEL).sum()
    all_tokens, all_sentences = counts or (tokens.item(), sentences.item())
    sentence_sum = F.cross_entropy(
        sentence_logits.float(), order, ignore_index=IGNORED_LABEL, reduction="sum"
    )
    token_sum = (token_losses.float() * loss_mask).sum()
    # Without any token the sentences alone make up the mean.
    count = tokens if all_tokens else sentences
    weight = all_tokens / max(all_sentences, 1) if all_tokens else 1.0
    return _summed(token_sum + weight * sentence_sum, count)


def classification_loss(
    rules: RowLabels, labels: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum, count, report) of a micro-batch's classes, labels or numbers.

    Args:
        rules: What the labels are.
        labels: Classes [b] with -100 for none, or numbers [b] or [b, n] with NaN for none.
        output_tensor: Logits, [b, n].
    """
    logits, problem_type = output_tensor.float(), problem_type_of(rules, labels.dtype)
    if problem_type == "single_label_classification":
        labels = labels.reshape(-1)
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        return _summed(total, (labels != IGNORED_LABEL).sum())
    labels = labels.reshape(logits.shape).float()
    counts = ~labels.isnan()
    wanted, given = labels.masked_fill(~counts, 0.0), logits.masked_fill(~counts, 0.0)
    loss = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
    losses = loss(given, wanted, reduction="none")
    return _summed(losses.masked_fill(~counts, 0.0).sum(), counts.sum())


def _summed(
    total: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    report = torch.stack([total.detach().double(), count.double()])
    return total, count.int(), {"loss": report}
