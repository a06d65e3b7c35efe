"""What one layer keeps of a micro-batch for its backward pass, and what the loss needs. No torch.

Numbers are of the engine as it is built here: scaled dot product attention that keeps no scores,
and logits kept in the parameters' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_megatron.config.layout import Layout
from accelerate_megatron.models.latent import LatentAttention
from accelerate_megatron.models.shape import ModelShape

PARAMETER_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
LOG_SUM_BYTES = 4
"""What the attention keeps per query and head besides its output."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one rank computes on at a time."""

    precision: str
    micro_batch_size: int
    seq_length: int
    num_micro_batches: int
    decoder_seq_length: int | None = None
    """Of a decoder beside an encoder; None: as long as the encoder's."""
    recompute: str | None = None
    """None, "selective" (attention only, which keeps no scores anyway) or "full"."""
    shard_optimizer: bool = False
    """Whether the distributed optimizer is on."""
    on_cpu: bool = False
    """Whether it runs on the CPU: there torch's RMSNorm is several operations, which keep two fp32
    copies of its input; else the one operation keeps what it is given."""


def norm_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes that a norm keeps for each element of its input."""
    is_composite = work.on_cpu and shape.normalization == "RMSNorm"
    return 2 * 4 if is_composite else PARAMETER_BYTES[work.precision]


def layer_activation_bytes(shape: ModelShape, layout: Layout, work: Workload) -> float:
    """Return the bytes that one layer keeps of one micro-batch for its backward pass.

    With a GELU MLP four times as wide as the hidden size and no dropout this is 32 sbh
    in 16 bits, and 8 + 24 / t sbh over t tensor-parallel ranks without sequence
    parallelism. Without fused kernels, which is how the engine runs, a gated MLP keeps five
    times its width (gate and up in one, the activated gate, up again, their product), and
    rotary positions keep the turned queries and keys besides those before.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), table 2, less the terms of dropout
        masks and of attention scores, which torch's fused attention does not keep.
    """
    tokens = work.micro_batch_size * work.seq_length / layout.cp_size
    size, t = PARAMETER_BYTES[work.precision], layout.tp_size
    hidden = shape.hidden_size
    if work.recompute == "full":
        return tokens * hidden * size / layout.sequence_split_over
    # The inputs of norms, and of the linear layers that follow them.
    low_rank = (shape.latent.key_value_rank + (shape.latent.query_rank or 0)) if shape.latent else 0
    replicated = (2 * hidden + low_rank) * (norm_bytes(shape, work) + size)
    # What attention and MLP keep, and the attention's output, which is the projection's input.
    query = shape.num_attention_heads * shape.kv_channels
    split = size * (_attention_elements(shape, layout, work) + query + _mlp_elements(shape))
    dropouts = (shape.hidden_dropout > 0) * 2 * hidden  # masks of one byte
    scores = shape.num_attention_heads * LOG_SUM_BYTES
    if work.recompute == "selective":
        scores = 0
    of_tokens = (replicated + dropouts) / layout.sequence_split_over + (split + scores) / t
    return tokens * of_tokens + _rotation_bytes(shape, layout, work)


def _attention_elements(shape: ModelShape, layout: Layout, work: Workload) -> int:
    """Elements per token of queries, keys and values that the attention keeps, over all ranks.

    A query or a value that is a part of the projection's output keeps all of it.
    """
    query = shape.num_attention_heads * shape.kv_channels
    keys_and_values = 2 * shape.num_query_groups * shape.kv_channels
    if shape.latent is not None:
        return shape.num_attention_heads * _latent_head_elements(shape.latent, shape)
    is_turned = shape.position_embedding == "rope"
    if layout.cp_size > 1:
        # Keys and values of all ranks, and the outputs of the two chunks before they are joined.
        own = query if is_turned else query + keys_and_values
        return own + layout.cp_size * keys_and_values + query
    return query + keys_and_values + (query + keys_and_values // 2 if is_turned else 0)


def _latent_head_elements(latent: LatentAttention, shape: ModelShape) -> int:
    """Elements per token and head that latent attention keeps, besides its projection's input.

    Values are a part of the projection that has the keys' contents too, and keep all of it.
    """
    return 2 * latent.key_channels + latent.content_channels + shape.kv_channels


def _rotation_bytes(shape: ModelShape, layout: Layout, work: Workload) -> float:
    """Bytes of the sines and cosines by which one layer turns queries, and of those for keys."""
    if shape.position_embedding != "rope":
        return 0.0
    channels = shape.rotary_channels or shape.kv_channels
    positions = work.seq_length / layout.cp_size
    return 2 * 2 * positions * channels * PARAMETER_BYTES[work.precision]


def _mlp_elements(shape: ModelShape) -> float:
    """Elements per token between the two linear layers of an MLP, over all ranks.

    A routed expert keeps its tokens' inputs too, and its activations once more, weighted.
    """
    factor = 5 if shape.gated_mlp else 2
    experts = shape.experts
    if experts is None:
        return factor * shape.ffn_hidden_size
    routed = experts.top_k * ((factor + 1) * experts.ffn_hidden_size + shape.hidden_size)
    shared = factor * (experts.shared_ffn_hidden_size or 0)
    share_of_dense = len(experts.dense_layers) / shape.num_layers
    dense = factor * shape.ffn_hidden_size
    return (1 - share_of_dense) * (routed + shared) + share_of_dense * dense


def logits_bytes(shape: ModelShape, layout: Layout, work: Workload) -> int:
    """Return the bytes of one micro-batch's logits on a rank of the last stage."""
    tokens = work.micro_batch_size * work.seq_length // layout.cp_size
    columns = layout.padded_vocab_size(shape.vocab_size) // layout.tp_size
    return tokens * columns * PARAMETER_BYTES[work.precision]
