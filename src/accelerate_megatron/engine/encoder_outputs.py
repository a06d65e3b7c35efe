"""What an encoder computes in evaluation, whole: hidden states or logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.engine.schedule import run_schedule


def encoder_outputs(
    chunks: list[torch.nn.Module], run: RunConfig, batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Return an encoder's outputs, by transformers' names, on the last stage; None elsewhere.

    Every rank calls it, with the same batch on the ranks of one replica.

    Args:
        chunks: This rank's model chunks; dropout is off where they are in evaluation mode.
        run: The resolved run, of a model with `shape.encoder`.
        batch: `input_ids`, and `attention_mask` and `token_type_ids` if wanted, each [rows, s];
            rows must be a multiple of `run.num_micro_batches`.

    Returns:
        `last_hidden_state` [rows, s, h] and `pooler_output` [rows, h] without a head; `logits`
        [rows, s, vocabulary] of a masked language model, with sentence order `prediction_logits`
        and `seq_relationship_logits` [rows, 2]; `logits` [rows, num_labels] of a classifier.
    """
    rows, length = batch["input_ids"].shape
    padding = (0, -length % run.layout.sequence_multiple)
    whole = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}
    padded = {key: F.pad(value, padding) for key, value in whole.items()}
    parts = {key: value.chunk(run.num_micro_batches) for key, value in padded.items()}
    micro_batches = [
        {key: part[index] for key, part in parts.items()} for index in range(run.num_micro_batches)
    ]
    with torch.no_grad():
        reports = run_schedule(
            chunks,
            _forward_step,
            micro_batches,
            micro_batch_size=rows // run.num_micro_batches,
            seq_length=length + padding[1],
            forward_only=True,
        )
        if not parallel_state.is_pipeline_last_stage():
            return None
        outputs = [_named(run, report["output"], length) for report in reports]
        return {key: torch.cat([output[key] for output in outputs]) for key in outputs[0]}


def _forward_step(
    data_iterator: Iterator[Mapping[str, Any]], model: torch.nn.Module
) -> tuple[Any, Any]:
    batch = next(data_iterator)
    types = batch.get("token_type_ids")
    return model(batch["input_ids"], batch["attention_mask"], tokentype_ids=types), partial(_report)


def _report(output: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Hand the output through the schedule, which expects a loss, a count and a report."""
    first = output[0] if isinstance(output, tuple) else output
    none = first.new_zeros(())
    return none, none.int(), {"output": output}


def _named(run: RunConfig, output: Any, length: int) -> dict[str, torch.Tensor]:
    encoder = run.shape.encoder
    assert encoder is not None
    if encoder.head == "classification":
        return {"logits": output}
    first, second = output
    first = first[:, :length]
    if encoder.head == "none":
        return {"last_hidden_state": first, "pooler_output": second}
    logits = gather_from_tensor_model_parallel_region(first)[..., : run.shape.vocab_size]
    if encoder.head == "masked_lm":
        return {"logits": logits}
    return {"prediction_logits": logits, "seq_relationship_logits": second}
