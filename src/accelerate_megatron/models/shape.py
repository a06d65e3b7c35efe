"""What a model looks like, in one vocabulary for all families. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from accelerate_megatron.models.encoder import Encoder
from accelerate_megatron.models.encoder_decoder import EncoderDecoder
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.latent import LatentAttention

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The architecture of one model, as the engine has to build it.

    A family derives it from a Hugging Face config; the engine turns it into Megatron's
    `TransformerConfig`. Names follow Megatron's; sizes are counts, never per rank.
    """

    model_type: str
    """Hugging Face's `model_type`."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of the MLP; of one of its two halves when `gated_mlp`."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; Hugging Face calls it `num_key_value_heads`."""
    kv_channels: int
    """Channels of one attention head; Hugging Face calls it `head_dim`. Of its values, when
    `latent` says those of queries and keys."""
    vocab_size: int
    """Tokens of the vocabulary, without padding."""
    max_positions: int | None
    """The longest sequence; None for relative positions, which have no end."""
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: float
    activation: Activation
    gated_mlp: bool
    """Whether the MLP multiplies its activation by a second projection (SwiGLU and kin)."""
    linear_bias: bool
    """Whether the two linear layers of the MLP have biases."""
    qkv_bias: bool
    """Whether the projection to queries, keys and values has a bias."""
    attention_output_bias: bool
    """Whether the projection of the attention's output has a bias."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised, before their positions."""
    position_embedding: Literal["learned_absolute", "rope", "relative"]
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Hugging Face's `rope_parameters`: `rope_type`, `rope_theta` and the scaling's own."""
    rotary_channels: int | None = None
    """Channels of a head that rotary positions turn, from the first; None: all of them."""
    attention_windows: tuple[int | None, ...] = ()
    """By layer, how many tokens a token looks at, itself included; None: all before it.

    Empty: no layer has a window.
    """
    tied_embeddings: bool
    """Whether the output layer is the word embedding."""
    softmax_scale: float | None = None
    """Factor on the attention scores; None means 1 / sqrt(kv_channels)."""
    scale_attention_by_layer: bool = False
    """Whether the scores of layer n (from 1) are divided by n."""
    embedding_dropout: float = 0.0
    hidden_dropout: float = 0.0
    """Dropout on the output of attention and MLP, before the residual sum."""
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    """Dropout inside the MLP, on what its activation gives."""
    initializer_range: float = 0.02
    experts: Experts | None = None
    """The mixture of experts; None: every layer has one MLP of `ffn_hidden_size`."""
    latent: LatentAttention | None = None
    """The low-rank vectors that queries, keys and values come from; None: the hidden state."""
    encoder_decoder: EncoderDecoder | None = None
    """The encoder, of a model that has one; all other fields then describe the decoder."""
    encoder: Encoder | None = None
    """What makes the model a bidirectional encoder; None: it is a decoder."""

    def has_experts(self, layer: int) -> bool:
        """Return whether layer `layer`, counted from 0, has experts instead of one MLP."""
        return self.experts is not None and self.experts.are_in(layer)

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has one MLP of `ffn_hidden_size`."""
        return any(not self.has_experts(layer) for layer in range(self.num_layers))

    @property
    def key_channels(self) -> int:
        """Channels of one head's queries and keys."""
        return self.latent.key_channels if self.latent else self.kv_channels
