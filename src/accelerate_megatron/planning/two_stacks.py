"""What the stages of a model with an encoder and a decoder keep for their backward pass. No torch.

The relative positions of such a model are added to its attention scores, and learn: torch's fused
kernel for the CPU has no gradient for them, so there the scores are kept.
"""

from __future__ import annotations

from dataclasses import replace

from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.planning.activations import (
    LOG_SUM_BYTES,
    PARAMETER_BYTES,
    Workload,
    layer_activation_bytes,
    norm_bytes,
)
from accelerate_megatron.planning.parameters import stages_of_blocks

_SCORE_BYTES = 4
"""Of a score that is kept: one fp32 number, whatever the parameters' dtype."""


def decoders_work(shape: ModelShape, work: Workload) -> Workload:
    """Return the work of the decoder; of a model of one stack, all of it."""
    if shape.encoder_decoder is None or work.decoder_seq_length is None:
        return work
    return replace(work, seq_length=work.decoder_seq_length)


def bytes_of_stage(
    shape: ModelShape, layout: Layout, stage: int, work: Workload
) -> tuple[float, float]:
    """Return the bytes that a stage keeps of one micro-batch, and those of its largest layer."""
    assert shape.encoder_decoder is not None
    in_encoder, in_decoder = stages_of_blocks(shape, layout)
    total, largest = 0.0, 0.0
    tokens = work.micro_batch_size * work.seq_length / layout.sequence_split_over
    encoded = tokens * shape.hidden_size
    if stage in in_encoder:
        layer = layer_activation_bytes(shape, layout, work) + _scores(shape, layout, work)
        layers = shape.encoder_decoder.num_encoder_layers // len(in_encoder)
        total += layers * layer + _position_bytes(shape, layout, work)
        total += encoded * norm_bytes(shape, work) * (stage == in_encoder[-1])
        largest = layer
    if stage in in_decoder:
        own = decoders_work(shape, work)
        layer = layer_activation_bytes(shape, layout, own) + _scores(shape, layout, own)
        layer += _cross_attention_bytes(shape, layout, work)
        layers = shape.num_layers // len(in_decoder)
        total += layers * layer + _position_bytes(shape, layout, own)
        # All layers look at the same.
        total += encoded * PARAMETER_BYTES[work.precision]
        largest = max(largest, layer)
    return total, largest


def _position_bytes(shape: ModelShape, layout: Layout, work: Workload) -> float:
    """Bytes of what a stack adds to the scores of all its layers, the same for all rows."""
    heads = shape.num_attention_heads / layout.tp_size
    return PARAMETER_BYTES[work.precision] * heads * work.seq_length**2


def _scores(shape: ModelShape, layout: Layout, work: Workload) -> float:
    """Bytes of the scores of one layer's self-attention."""
    if work.recompute is not None or not work.on_cpu:
        return 0.0
    heads = shape.num_attention_heads / layout.tp_size
    return _SCORE_BYTES * work.micro_batch_size * heads * work.seq_length**2


def _cross_attention_bytes(shape: ModelShape, layout: Layout, work: Workload) -> float:
    """Bytes of a decoder layer's look at what the encoder gave: its norm, and the attention."""
    if work.recompute == "full":
        return 0.0
    size = PARAMETER_BYTES[work.precision]
    tokens = work.micro_batch_size * decoders_work(shape, work).seq_length
    encoded = work.micro_batch_size * work.seq_length
    width = shape.num_attention_heads * shape.kv_channels
    norm = tokens * shape.hidden_size * (norm_bytes(shape, work) + size)
    # Queries and outputs, keys and values.
    attention = size * width * 2 * (tokens + encoded)
    sums = tokens * shape.num_attention_heads * LOG_SUM_BYTES
    return norm / layout.sequence_split_over + (attention + sums) / layout.tp_size
