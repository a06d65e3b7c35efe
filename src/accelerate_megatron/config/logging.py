"""What is logged of each update, and the arithmetic of a model's work. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from accelerate_megatron.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """Which numbers are logged, where, and how often."""

    tensorboard_dir: str | None = None
    """Where event files go; None: lines of the log, if anything is logged at all."""
    interval: int = 1
    """Updates from one entry to the next."""
    learning_rate: bool = True
    loss_scale: bool = True
    batch_size: bool = True
    throughput: bool = True
    params_norm: bool = False
    num_zeros: bool = False
    memory: bool = False
    timers: bool = False
    world_size: bool = False
    validation: bool = True


_ALL = ("params_norm", "num_zeros", "memory", "timers", "world_size")


def resolve_logging(plugin: Any) -> LoggingSettings | None:
    """Return what the plugin asks to log; None for nothing."""
    if plugin.tensorboard_dir is None and not plugin.set_all_logging_options:
        return None
    settings = LoggingSettings(tensorboard_dir=plugin.tensorboard_dir)
    if plugin.set_all_logging_options:
        everything: dict[str, Any] = dict.fromkeys(_ALL, True)
        settings = replace(settings, **everything)
    return replace(settings, **plugin.routed_arguments.of("logging"))


PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "A100": 312.0,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""Dense 16-bit peak of a device by words of its name, longer ones first.

Source: NVIDIA's data sheets, tensor cores with fp32 accumulation and without sparsity.
"""


def peak_tflops(device_name: str) -> float | None:
    """Return a device's dense 16-bit peak in TFLOP/s; None for one that is not in the table."""
    # As words: an L40 is no L4, and an A3000 no A30.
    named = (p for name, p in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name))
    return next(named, None)


def flops_per_token(shape: ModelShape, seq_length: int) -> float:
    """Return the floating-point operations of forward and backward for one token of a sequence.

    Matrix products alone, a multiplication and an addition each counting as one, the backward
    pass twice the forward one. Of a causal attention half the scores count; recomputation does
    not, as usual for MFU.
    """
    # Queries by keys, and weights by values.
    channels = shape.key_channels + shape.kv_channels
    seen = seq_length if shape.encoder is not None else seq_length / 2
    projections, scores = _projections(shape), shape.num_attention_heads * channels * seen
    layers = sum(
        projections + scores + _mlp_products(shape, layer) for layer in range(shape.num_layers)
    )
    return 3 * 2.0 * (layers + _head_products(shape))


def _head_products(shape: ModelShape) -> int:
    """Return the multiplications of a token's head; those of whole rows are too few to count."""
    vocabulary = shape.hidden_size * shape.vocab_size
    if shape.encoder is None:
        return vocabulary
    return (vocabulary + shape.hidden_size**2) if shape.encoder.has_vocabulary_head else 0


def _projections(shape: ModelShape) -> int:
    """Return the multiplications of one layer's projections before and after attention."""
    latent = shape.latent
    output = shape.num_attention_heads * shape.kv_channels * shape.hidden_size
    if latent is None:
        return 2 * output + 2 * shape.num_query_groups * shape.kv_channels * shape.hidden_size
    queries = shape.num_attention_heads * latent.key_channels
    keys_and_values = shape.num_attention_heads * (latent.content_channels + shape.kv_channels)
    down = shape.hidden_size * (latent.key_value_rank + latent.position_channels)
    up = latent.key_value_rank * keys_and_values
    rank = latent.query_rank
    query = shape.hidden_size * queries if rank is None else rank * (shape.hidden_size + queries)
    return query + down + up + output


def encoder_decoder_flops(shape: ModelShape, encoder_length: int, decoder_length: int) -> float:
    """Return the same for a row of an encoder-decoder model: for all its tokens."""
    assert shape.encoder_decoder is not None
    width = shape.num_attention_heads * shape.kv_channels
    projection, mlp = shape.hidden_size * width, _mlp_products(shape, 0)
    s, t = encoder_length, decoder_length
    encoder = s * (4 * projection + mlp) + 2 * s * s * width
    decoder = t * (4 * projection + mlp) + t * t * width
    cross = 2 * (s + t) * projection + 2 * s * t * width
    layers = shape.encoder_decoder.num_encoder_layers * encoder
    layers += shape.num_layers * (decoder + cross)
    return 3 * 2.0 * (layers + t * shape.hidden_size * shape.vocab_size)


def _mlp_products(shape: ModelShape, layer: int) -> int:
    """Return the multiplications of one layer's MLP, or of the experts that a token takes."""
    matrices = 3 if shape.gated_mlp else 2
    experts = shape.experts
    if experts is None or not shape.has_experts(layer):
        return matrices * shape.hidden_size * shape.ffn_hidden_size
    width = experts.top_k * experts.ffn_hidden_size + (experts.shared_ffn_hidden_size or 0)
    return shape.hidden_size * (matrices * width + experts.num_experts)
