"""What a model with an encoder and a decoder has besides the decoder. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """The encoder, and what ties it to the decoder that the rest of a `ModelShape` describes.

    Encoder and decoder differ in depth alone. Each adds a learned number to its attention
    scores, which depends on the head and on how far key and query are apart.
    """

    num_encoder_layers: int
    position_buckets: int
    """Distances with a number of their own, per head."""
    max_distance: int
    """From here on all distances share the last bucket."""
    output_scale: float
    """Factor on what the decoder gives to the output layer."""
    decoder_start_token_id: int | None
    """First decoder input where a batch has labels only; None: such a batch is refused."""
    pad_token_id: int | None
    """Decoder input in the place of a label of -100; None: likewise."""
