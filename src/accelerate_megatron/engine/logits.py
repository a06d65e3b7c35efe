"""The logits of a model, whole: all tokens, the vocabulary gathered, no padded columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from accelerate_megatron.config.encoder_decoder_rules import refuse_encoder_decoder
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.context_parallel import gather_sequence, take_slice
from accelerate_megatron.engine.schedule import run_schedule
from accelerate_megatron.engine.wrapping import innermost
from accelerate_megatron.models.encoder import Encoder


def model_logits(
    chunks: list[torch.nn.Module], run: RunConfig, input_ids: torch.Tensor
) -> torch.Tensor | None:
    """Return the logits [rows, s, vocabulary] on the ranks of the last stage, None elsewhere.

    Every rank calls it, with the same tokens on the ranks of one replica. Positions count from
    0, and every token looks at those before it.

    Args:
        chunks: This rank's model chunks; dropout is off where they are in evaluation mode.
        run: The resolved run.
        input_ids: [rows, s]; rows must be a multiple of `run.num_micro_batches`.

    Raises:
        UnsupportedError: The model has an encoder and a decoder.
    """
    refuse_encoder_decoder(run.shape, "the computation of logits")
    rows, length = input_ids.shape
    multiple = run.layout.sequence_multiple
    padded = F.pad(input_ids, (0, -length % multiple))
    micro_batches = [{"ids": part} for part in padded.chunk(run.num_micro_batches)]
    with torch.no_grad():
        reports = run_schedule(
            chunks,
            _forward_step,
            micro_batches,
            micro_batch_size=rows // run.num_micro_batches,
            seq_length=padded.shape[1],
            forward_only=True,
        )
        if not parallel_state.is_pipeline_last_stage():
            return None
        parts = [gather_from_tensor_model_parallel_region(report["logits"]) for report in reports]
        whole: torch.Tensor = torch.cat(parts)
        if run.layout.cp_size > 1:
            group = parallel_state.get_context_parallel_group()
            whole = gather_sequence(whole.transpose(0, 1), group, grads_are_partial=False)
            whole = whole.transpose(0, 1)
    return whole[:, :length, : run.shape.vocab_size]


def _forward_step(
    data_iterator: Iterator[Mapping[str, Any]], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    ids = next(data_iterator)["ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    size = parallel_state.get_context_parallel_world_size()
    if size > 1:
        rank = parallel_state.get_context_parallel_rank()
        ids, positions = (take_slice(x, dim=1, rank=rank, size=size) for x in (ids, positions))
    return model(ids, positions, None), partial(_report)


def _report(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Hand the logits through the schedule, which expects a loss, a count and a report."""
    none = logits.new_zeros(())
    return none, none.int(), {"logits": logits}


class LogitsRecorder:
    """Keeps the logits that a model's heads compute on the way to the loss.

    Hooks on the heads, so that the loss is computed as without them, and a train step of any kind
    is recorded.
    """

    def __init__(self, chunks: list[torch.nn.Module], run: RunConfig) -> None:
        """Watch the heads, where this rank holds the last stage."""
        self._run = run
        self._parts: dict[str, list[torch.Tensor]] = {}
        for chunk in chunks:
            model: Any = innermost(chunk)
            if getattr(model, "post_process", False):
                for name, head in _heads(run.shape.encoder).items():
                    getattr(model, head).register_forward_hook(partial(self._keep, name))

    def begin(self) -> None:
        """Forget what was kept: a pass of the schedule begins."""
        self._parts = {}

    def take(self) -> dict[str, torch.Tensor]:
        """Return the logits of the last pass by transformers' names, without gradient.

        Those of tokens are [rows, s, vocabulary], those of rows [rows, n]. Every rank calls it;
        empty before the last stage.
        """
        parts, self._parts = self._parts, {}
        with torch.no_grad():
            return {
                name: torch.cat(each) if each[0].dim() == 2 else self._whole(each)
                for name, each in parts.items()
            }

    def _whole(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return [rows, s, vocabulary] of micro-batches [s / cp, b, padded vocabulary / tp]."""
        group = parallel_state.get_tensor_model_parallel_group()
        whole = torch.cat([gather_from_tensor_model_parallel_region(p, group) for p in parts], 1)
        if self._run.layout.cp_size > 1:
            cp_group = parallel_state.get_context_parallel_group()
            whole = gather_sequence(whole, cp_group, grads_are_partial=False)
        return whole[..., : self._run.shape.vocab_size].transpose(0, 1)

    def _keep(self, name: str, _module: Any, _inputs: Any, outputs: Any) -> None:
        logits: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        self._parts.setdefault(name, []).append(logits.detach())


def _heads(encoder: Encoder | None) -> dict[str, str]:
    """Return transformers' name of each head's logits, and the module that computes them."""
    if encoder is not None and encoder.head == "classification":
        return {"logits": "classification_head"}
    if encoder is not None and encoder.head == "pretraining":
        return {"prediction_logits": "output_layer", "seq_relationship_logits": "binary_head"}
    return {"logits": "output_layer"}
