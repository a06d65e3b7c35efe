"""Which attention is run, and in which precision its softmax is. Values in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate_megatron.config.plugin_fields import FALSE_WORDS, TRUE_WORDS
from accelerate_megatron.models.shape import ModelShape

_BEST = ("none", *TRUE_WORDS, "auto")
_SDPA = "sdpa"
_UNFUSED = (*FALSE_WORDS, "unfused", "local")
_NOT_HERE = ("flash", "fused")


@dataclass(frozen=True)
class AttentionSettings:
    """How the core attention is computed.

    Attributes:
        kernel: "sdpa", torch's scaled dot product attention; "unfused", two matrix products with
            the scores [b, heads, s, s] between them; "auto", torch's or, where that is faster,
            `engine/block_attention.py`.
        softmax_in_fp32: Whether the softmax of the scores is fp32. So it always is but for
            "unfused".
    """

    kernel: str = "auto"
    softmax_in_fp32: bool = True


def resolve_attention(plugin: Any) -> AttentionSettings:
    """Return what the plugin's two fields, which have been checked, ask for."""
    word = str(plugin.attention_backend).lower()
    kernel = "auto" if word in _BEST else _SDPA if word == _SDPA else "unfused"
    return AttentionSettings(kernel=kernel, softmax_in_fp32=plugin.attention_softmax_in_fp32)


def backend_problem(backend: Any) -> str:
    """Return why `attention_backend` cannot be `backend`; empty when it can."""
    word = str(backend).lower()
    if word in (*_BEST, _SDPA, *_UNFUSED):
        return ""
    if word in _NOT_HERE:
        return (
            f"MegatronLMPlugin.attention_backend is {backend!r}, a kernel of Transformer Engine's, "
            "whose layers are not used here. Leave it out for the fastest kernel of the device; "
            "'sdpa' is torch's, 'unfused' the plain one."
        )
    return (
        f"MegatronLMPlugin.attention_backend is {backend!r}; it must be True or 'auto' (the "
        "fastest), 'sdpa' (torch's scaled dot product attention), or False, 'unfused' or 'local' "
        "(matrix products)."
    )


def softmax_problems(plugin: Any, shape: ModelShape, precision: str) -> list[str]:
    """Return why a softmax outside fp32 would have no effect; empty when it has, or is not asked.

    Args:
        plugin: The plugin.
        shape: The model's.
        precision: `mixed_precision`.
    """
    if plugin.attention_softmax_in_fp32:
        return []
    start = "attention_softmax_in_fp32 is False, but "
    problems = []
    if resolve_attention(plugin).kernel != "unfused":
        problems.append(
            f"{start}attention that keeps no scores always has its softmax in fp32. Set "
            "attention_backend='unfused', or leave attention_softmax_in_fp32 out."
        )
    if precision == "no":
        problems.append(
            f"{start}mixed_precision is 'no', so that all is fp32. Set mixed_precision to 'bf16' "
            "or 'fp16', or leave attention_softmax_in_fp32 out."
        )
    if shape.scale_attention_by_layer:
        problems.append(
            f"{start}the model scales its attention by layer (scale_attn_by_inverse_layer_idx), "
            "which needs fp32. Leave attention_softmax_in_fp32 out."
        )
    return problems
