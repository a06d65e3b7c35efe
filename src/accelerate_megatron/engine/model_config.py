"""Megatron's model configuration, with what our own layers need besides."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig

from accelerate_megatron.models.latent import LatentAttention


@dataclass
class ModelConfig(TransformerConfig):  # type: ignore[misc]  # megatron is untyped
    """A `TransformerConfig` that also says what differs by layer, or by linear layer.

    Megatron hands its config to every module it builds, so this is how settings reach the
    modules of the layer spec.
    """

    attention_windows: tuple[int | None, ...] = ()
    """By layer, how many tokens a token looks at, itself included; None: all before it."""
    attention_output_bias: bool = False
    """Of `linear_proj`; `add_bias_linear` speaks for the MLP, `add_qkv_bias` for `linear_qkv`."""

    latent: LatentAttention | None = None
    """The low-rank vectors of multi-latent attention; None: attention has none."""
    mlp_dropout: float = 0.0
    """Dropout on what the MLP's activation gives, before `linear_fc2`."""
    attention_kernel: str = "auto"
    """As `AttentionSettings.kernel`."""

    def attention_window(self, layer_number: int) -> int | None:
        """Return the window of a layer, counted from 1 over the whole model."""
        return self.attention_windows[layer_number - 1] if self.attention_windows else None
