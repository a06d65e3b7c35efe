"""The model that `prepare` returns: called with a batch, it does the whole step."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.generic import ModelOutput

from accelerate_megatron import engine
from accelerate_megatron.errors import TrainingLoopError, UnsupportedError
from accelerate_megatron.failures import same_on_every_rank
from accelerate_megatron.faults.watchdog import WAITING
from accelerate_megatron.generation.generate import GeneratingModel, generate
from accelerate_megatron.generation.settings import GENERATION_ARGUMENTS
from accelerate_megatron.training.batches import BatchGate
from accelerate_megatron.training.metrics import Meter
from accelerate_megatron.training.resolve import ResolvedModel
from accelerate_megatron.training.session import TrainingSession
from accelerate_megatron.training.t5 import stack_lengths
from accelerate_megatron.weights.exporting import (
    ExportOptions,
    float_dtype,
    gather_state_dict,
    save_hf_folder,
)
from accelerate_megatron.weights.hf_folder import shard_size_bytes
from accelerate_megatron.weights.holders import ModelHolders
from accelerate_megatron.weights.placements import expected_hf_shapes


class MegatronModel(torch.nn.Module):
    """A Hugging Face model on Megatron's engine.

    `model(**batch)` in training mode with gradients on is one update: forward, backward,
    gradient reduction, clipping, optimizer and scheduler. Otherwise it is a forward pass.
    All ranks call it together. `parameters()` are this rank's shards.

    Attributes:
        config: The Hugging Face config.
        session: The engine's side.
        last_loss: The tensor that the last call returned as its loss.
        last_was_update: Whether the last call made an update.
        meter: Measures updates; `meter.last` is the record of the last one.
    """

    def __init__(self, session: TrainingSession, resolved: ResolvedModel, gate: BatchGate) -> None:
        """Wrap a session.

        Args:
            session: The engine's side.
            resolved: The model's config and the table of its weights.
            gate: Checks batches, on all ranks alike.
        """
        super().__init__()
        self.chunks = torch.nn.ModuleList(session.chunks)
        self.session = session
        self.meter = Meter(session)
        self.config = resolved.contents.hf_config
        self.last_loss: torch.Tensor | None = None
        self.last_was_update = False
        self._resolved = resolved
        self._gate = gate
        self._num_generate_calls = 0

    def forward(self, input_ids: torch.Tensor | None = None, **batch: Any) -> ModelOutput:
        """Do a step with this data-parallel rank's batch and return its loss.

        Args:
            input_ids: Token ids, [num_micro_batches x micro-batch, s].
            **batch: `labels`, and what else the train step reads.

        Returns:
            What transformers' own model returns. `loss`: mean over the valid tokens of the global
            batch, the same on every rank, without gradient. `logits`: with the plugin's
            `return_logits`, [rows, s, vocabulary] on the ranks of the last stage, as they were
            before the update; else None. A classifier's are [rows, num_labels]; a BERT's of two
            heads are `prediction_logits` and `seq_relationship_logits`.

        Raises:
            BatchError: The batch does not fit the model; raised alike on every rank.
            TrainingLoopError: Training mode, but no optimizer was prepared; or some ranks train
                and some evaluate.
        """
        if input_ids is not None:
            batch = {"input_ids": input_ids, **batch}
        is_update = self.training and torch.is_grad_enabled()
        with self.session.watch(WAITING):
            checked = self._gate.admit(batch, is_update=is_update)
        if is_update:
            self.session.loop.before_update(rate_has_ended=self.session.rate_has_ended)
        with self.session.watch("running a step"):
            loss = self.meter.update(checked) if is_update else self.session.evaluate(checked)
            logits = self.session.take_logits()
        self.last_loss, self.last_was_update = loss, is_update
        if "input_ids" in batch:
            logits = {name: self._asked_for(value, batch) for name, value in logits.items()}
        return self.session.train_step.model_output_class(loss=loss, **logits)

    def _asked_for(self, logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """Return the logits of the caller's rows and tokens, without those that we added."""
        rows, length = batch["input_ids"].shape
        if self.session.run.shape.encoder_decoder is not None:
            _, length = stack_lengths(batch)
        return logits[:rows] if logits.dim() == 2 else logits[:rows, :length]

    def megatron_generate(  # noqa: PLR0913  # Accelerate's documented signature
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        length_penalty: float | None = None,
        top_p_decay: float | None = None,
        top_p_bound: float | None = None,
        vocab_size: int | None = None,
        add_BOS: bool | None = None,  # noqa: N803  # Accelerate's name
        **kwargs: Any,
    ) -> torch.Tensor:
        """Continue prompts; all ranks call it, each data-parallel rank with its own prompts.

        Takes the likeliest token each time, unless a setting asks for sampling (`temperature`,
        `top_k`, `top_p`, `do_sample=True`) or for beams. Changes nothing of a training around
        it. docs/generation.md has the details.

        Args:
            input_ids: int [b, s], padded on one side.
            attention_mask: [b, s], 1 for a prompt's tokens; None: all are.
            max_length: Tokens of a row in the end, those of `input_ids` included.
            max_new_tokens: Tokens to add.
            num_beams: Beams of each prompt; 1: none.
            temperature: Divides the logits before a token is drawn.
            top_k: Draw from so many likeliest tokens; 0: from all.
            top_p: Draw from the likeliest tokens that reach this probability, in (0, 1].
            length_penalty: Power of the length that a beam's score is divided by.
            top_p_decay: Multiplies `top_p` after each token.
            top_p_bound: What `top_p` does not fall below.
            vocab_size: Generate only tokens below it.
            add_BOS: Put the model's first token before each prompt.
            **kwargs: `do_sample`, `seed`, `early_stopping`, `eos_token_id`, `pad_token_id`,
                `bos_token_id`, `decoder_start_token_id`, and `streamer`, which gets tokens as
                transformers' streamers do.

        Returns:
            int64 [b, s + new] on every rank of the replica: with padding on the left as
            transformers' `generate` returns it; with padding on the right each row's new tokens
            follow its prompt. After an end token there is padding. Of a model with an encoder
            int64 [b, 1 + new], which `max_length` counts too.

        Raises:
            GenerationError: A prompt or a setting does not fit, or a rank's streamer failed;
                alike on every rank.
        """
        named = locals()
        asked = {name: named[name] for name in GENERATION_ARGUMENTS}
        session = self.session
        model = GeneratingModel(
            chunks=session.chunks,
            run=session.run,
            ranks=session.ranks,
            device=session.device,
            configs=(self._resolved.contents.generation_config, self.config),
            num_calls=self._num_generate_calls,
        )
        self._num_generate_calls += 1
        with session.watch("generating"):
            return generate(model, input_ids, attention_mask, {**asked, **kwargs})

    @property
    def hf_configs(self) -> dict[str, Any]:
        """The Hugging Face configs of the model, by the names of their files."""
        contents = self._resolved.contents
        found = {"config": contents.hf_config, "generation_config": contents.generation_config}
        return {name: config for name, config in found.items() if config is not None}

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        max_shard_size: int | str = "5GB",
        dtype: str | torch.dtype | None = None,
        overwrite: bool = True,
        **transformers_arguments: Any,
    ) -> None:
        """Write a folder that transformers loads. Every rank calls it; the last one writes.

        Args:
            save_directory: The folder; files of an older model in it are replaced.
            tokenizer: Saved along, if given.
            max_shard_size: Largest size of one weights file.
            dtype: Of the weights, "float32" or torch.float32; None: the model's. Any other
                than the model's is made of the optimizer's fp32 copies, where it keeps some.
            overwrite: Whether a folder that already holds a model may be replaced.
            **transformers_arguments: Others that transformers' method takes: `is_main_process`,
                `save_function` and `safe_serialization=True` have no effect, as the ranks know
                who writes, and files are always safetensors; the rest is refused.

        Raises:
            ConfigurationError: The folder is a file or may not be replaced, `max_shard_size` is
                no size, `dtype` is no floating dtype, or there is too little room on the disk.
            UnsupportedError: Another argument of transformers' is given, `state_dict` above all;
                or the model has rotary positions that only the plugin gave it.
            RanksDisagreeError: Ranks gave different arguments.
        """

        def resolve() -> ExportOptions:
            _refuse_forced_positions(self._resolved.left_out, self.session.run.shape.model_type)
            _refuse_unwritten(transformers_arguments)
            return ExportOptions(
                dtype=None if dtype is None else float_dtype(dtype),
                max_shard_size=shard_size_bytes(max_shard_size),
                overwrite=overwrite,
            )

        options = same_on_every_rank(resolve, self._ranks.all_gather, what="save_pretrained")
        save_hf_folder(
            save_directory,
            self._shards_for(options.dtype),
            table=self._resolved.disk_table,
            shape=self.session.run.shape,
            contents=replace(self._resolved.contents, tokenizer=tokenizer),
            options=options,
            ranks=self._ranks,
        )

    def gather_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the Hugging Face state dict on the last rank, None elsewhere; all call it.

        Learned positions that the plugin has replaced by rotary ones are not in it.
        """
        return gather_state_dict(
            engine.model_shards(self.session.chunks),
            table=self._resolved.table,
            shape=self.session.run.shape,
            ranks=self._ranks,
        )

    def num_parameters(self) -> int:
        """Return the number of values of the whole model, a tied one counted once."""
        shapes = expected_hf_shapes(self._resolved.table, self.session.run.shape)
        return sum(math.prod(shape) for shape in shapes.values())

    def _shards_for(self, dtype: torch.dtype | None) -> list[engine.Shard]:
        if dtype is None or self.session.optimizer is None:
            return engine.model_shards(self.session.chunks)
        return engine.main_copy_shards(self.session.chunks, self.session.optimizer)

    @property
    def _ranks(self) -> ModelHolders:
        if not dist.is_initialized():
            raise TrainingLoopError(
                "The process group is gone, over which the ranks would put the model together: "
                "accelerator.end_training() ends it. Save before that call."
            )
        return ModelHolders(group=dist.group.WORLD, device=self.session.device)


def _refuse_forced_positions(left_out: Sequence[str], model_type: str) -> None:
    """Refuse a folder that transformers would load with learned positions of random values."""
    if left_out:
        raise UnsupportedError(
            f"The model is no {model_type} any more: use_rotary_position_embeddings gave it rotary "
            f"positions, and {', '.join(left_out)} is left out. transformers would load the folder "
            "with learned positions of random values. Keep it with accelerator.save_state; "
            "accelerator.get_state_dict returns the weights that it has."
        )


def _refuse_unwritten(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of transformers' `save_pretrained` that would change nothing here.

    By name alone, not by value: a script gives them on every rank, and a `state_dict` that is None
    on all ranks but one must be refused on all.
    """
    if "state_dict" in arguments:
        raise UnsupportedError(
            "save_pretrained got state_dict, but the weights are on all ranks, each of which sends "
            "its own to the one that writes. Leave it out: save_pretrained(folder) on every rank."
        )
    if not arguments.get("safe_serialization", True):
        raise UnsupportedError(
            "save_pretrained got safe_serialization=False, but weights are written as safetensors "
            "only; leave it out."
        )
    known = ("is_main_process", "save_function", "safe_serialization")
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise UnsupportedError(
            f"save_pretrained does not take {', '.join(unknown)} here; leave it out."
        )
