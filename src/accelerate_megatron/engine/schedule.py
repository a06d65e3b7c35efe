"""One pass of Megatron's pipeline schedule over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from accelerate_megatron.engine.encoder_decoder import EncoderDecoderStage
from accelerate_megatron.engine.messages import SENT
from accelerate_megatron.engine.products import fast_products
from accelerate_megatron.engine.wrapping import innermost

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]
"""Megatron's: (data iterator, model chunk) -> (output, loss function of the output)."""


def run_schedule(
    chunks: list[torch.nn.Module],
    forward_step: ForwardStep,
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    micro_batch_size: int,
    seq_length: int,
    forward_only: bool,
    encoder_length: int | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Run forward (and backward) for all micro-batches; return the last stage's reports.

    Called by every rank of a pipeline with micro-batches of one shape. Gradients are
    added up and reduced over all groups when it returns; nothing is updated.

    Args:
        chunks: This rank's model chunks.
        forward_step: See `ForwardStep`.
        micro_batches: The micro-batches; each chunk gets an iterator of its own over them.
        micro_batch_size: Rows of a micro-batch.
        seq_length: Tokens of a row; the activations sent between stages are
            [seq_length / tp if sequence parallel, micro_batch_size, hidden].
        forward_only: Whether to leave out the backward passes.
        encoder_length: Tokens of an encoder's row, of a model that has one; `seq_length` is then
            its decoder's.

    Returns:
        What the loss function reported for each micro-batch; empty before the last stage.
    """
    iterators = [iter(micro_batches) for _ in chunks]
    stage = innermost(chunks[0])
    shapes: dict[str, Any] = {}
    if encoder_length is not None and isinstance(stage, EncoderDecoderStage) and stage.has_peers:
        shapes["adjust_tensor_shapes_fn"] = stage.message_shapes(encoder_length, seq_length)
    with fast_products(chunks):
        reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=seq_length,
            forward_only=forward_only,
            **shapes,
        )
    SENT.wait()
    return reports


def clear_gradients(chunks: list[torch.nn.Module], optimizer: Any) -> None:
    """Zero the gradient buffers, and drop the views on them that the last update left behind."""
    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()


def scale_gradients(chunks: list[torch.nn.Module], factor: float) -> None:
    """Multiply the reduced gradients of all chunks, before the optimizer's step."""
    if factor != 1.0:
        for chunk in chunks:
            chunk.scale_gradients(factor)  # type: ignore[operator]
