"""Bytes that one rank needs: parameters, gradients, optimizer, activations. No torch.

Numbers are of the engine as it is built here, with fp32 gradient buffers and AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.planning.activations import (
    PARAMETER_BYTES,
    Workload,
    layer_activation_bytes,
    logits_bytes,
    norm_bytes,
)
from accelerate_megatron.planning.parameters import RankParameters
from accelerate_megatron.planning.two_stacks import bytes_of_stage, decoders_work

GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32, whatever the parameters' dtype."""
MOMENT_BYTES = 4 + 4
MAIN_COPY_BYTES = {"no": 0, "bf16": 4, "fp16": 4}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank; `workspace` are tensors that live within one operation."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """All of them together: the peak of a training step."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


def rank_memory(
    shape: ModelShape, layout: Layout, stage: int, parameters: RankParameters, work: Workload
) -> RankMemory:
    """Return the bytes of a rank on pipeline stage `stage`, counted from 0."""
    is_last = stage == layout.pp_size - 1
    in_flight = micro_batches_in_flight(layout, stage, work.num_micro_batches, shape.num_layers)
    kept, _ = _bytes_of_stage(shape, layout, stage, work)
    most = _largest_of_the_moment(shape, layout, stage, work, is_last=is_last)
    logits = logits_bytes(shape, layout, decoders_work(shape, work)) if is_last else 0
    return RankMemory(
        parameters=parameters.total * PARAMETER_BYTES[work.precision],
        gradients=parameters.total * GRADIENT_BYTES,
        optimizer=_optimizer_bytes(parameters, layout, work),
        activations=round(in_flight * kept + most),
        # fp32 softmax and the gradient of the logits, when the loss goes back.
        workspace=logits // PARAMETER_BYTES[work.precision] * (4 + 2),
    )


def _bytes_of_stage(
    shape: ModelShape, layout: Layout, stage: int, work: Workload
) -> tuple[float, float]:
    """Return the bytes that a stage keeps of one micro-batch, and those of its largest layer."""
    if shape.encoder_decoder is not None:
        return bytes_of_stage(shape, layout, stage, work)
    layer = layer_activation_bytes(shape, layout, work)
    return shape.num_layers // layout.pp_size * layer, layer


def _largest_of_the_moment(
    shape: ModelShape, layout: Layout, stage: int, work: Workload, *, is_last: bool
) -> float:
    """Return the bytes that come on top of what the layers keep, at the worst moment.

    The last stage keeps what the loss needs until it goes back; after that, with full
    recomputation, a stage holds all of one layer, the one that it has just computed again.
    """
    head = _head_bytes(shape, layout, decoders_work(shape, work)) if is_last else 0.0
    if work.recompute != "full":
        return head
    _, again = _bytes_of_stage(shape, layout, stage, replace(work, recompute=None))
    # The first norm's input is the one that the layer kept already.
    return max(head, again - _bytes_of_stage(shape, layout, stage, work)[1])


def _head_bytes(shape: ModelShape, layout: Layout, work: Workload) -> float:
    """Return the bytes of the final norm's input, the output layer's, and the logits."""
    tokens = work.micro_batch_size * work.seq_length / layout.cp_size
    output_input = tokens * shape.hidden_size * PARAMETER_BYTES[work.precision]
    norm_input = tokens * shape.hidden_size * norm_bytes(shape, work)
    inputs = (norm_input + output_input) / layout.sequence_split_over
    return inputs + logits_bytes(shape, layout, work)


def _optimizer_bytes(parameters: RankParameters, layout: Layout, work: Workload) -> int:
    per_parameter = MOMENT_BYTES + MAIN_COPY_BYTES[work.precision]
    if not work.shard_optimizer:
        return parameters.total * per_parameter
    dense_ranks = layout.dp_size * layout.cp_size
    stage_ranks = layout.world_size // layout.pp_size
    expert_ranks = stage_ranks // (layout.ep_size * layout.etp_size)
    return per_parameter * (
        -(-parameters.dense // dense_ranks) + -(-parameters.experts // expert_ranks)
    )


def micro_batches_in_flight(
    layout: Layout, stage: int, num_micro_batches: int, num_layers: int
) -> float:
    """Return how many micro-batches' activations a stage holds at its peak, under 1F1B.

    Stage i of p starts with p - i - 1 forward passes and then alternates. Interleaved with v
    chunks, it starts with 2 (p - i - 1) + (v - 1) p forward passes of a v-th each: the first stage
    holds 1 + (p - 1) / (p v) times as much.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3, for the first stage;
        megatron-core 0.16.1, get_pp_rank_microbatches, for the others.
    """
    p = layout.pp_size
    chunks = layout.chunks_per_stage(num_layers)
    if chunks is None:
        return min(num_micro_batches, p - stage)
    return min(num_micro_batches, (2 * (p - stage - 1) + (chunks - 1) * p + 1) / chunks)
