"""The families this package knows, and how a config finds its own. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.models.bert import BERT
from accelerate_megatron.models.deepseek_v3 import DEEPSEEK_V3
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.glm4_moe import GLM4_MOE
from accelerate_megatron.models.gpt2 import GPT2
from accelerate_megatron.models.llama import LLAMA
from accelerate_megatron.models.megatron_bert import MEGATRON_BERT
from accelerate_megatron.models.mistral import MISTRAL
from accelerate_megatron.models.mixtral import MIXTRAL
from accelerate_megatron.models.mt5 import MT5
from accelerate_megatron.models.phi3 import PHI3
from accelerate_megatron.models.qwen2 import QWEN2
from accelerate_megatron.models.qwen2_moe import QWEN2_MOE
from accelerate_megatron.models.qwen3 import QWEN3
from accelerate_megatron.models.qwen3_moe import QWEN3_MOE
from accelerate_megatron.models.stablelm import STABLELM
from accelerate_megatron.models.starcoder2 import STARCODER2
from accelerate_megatron.models.t5 import T5

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        BERT,
        DEEPSEEK_V3,
        GLM4_MOE,
        GPT2,
        LLAMA,
        MEGATRON_BERT,
        MISTRAL,
        MIXTRAL,
        MT5,
        PHI3,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        STABLELM,
        STARCODER2,
        T5,
    )
}
"""By Hugging Face's `model_type`."""

NEAR_FAMILIES = {
    "umt5": "each of its layers has a relative position bias of its own, where T5 and mT5 share "
    "one in all layers of a stack",
}
"""Model types that look like a family's and are not, with the reason."""


def family_of(hf_config: Any, *, architectures: Sequence[str] | None = None) -> Family:
    """Return the family of a Hugging Face config.

    Args:
        hf_config: The config.
        architectures: Class names to check instead of `hf_config.architectures`. Pass those of
            a live model (its class and its bases): its config may still name the class it was
            saved as. One of them must be supported.

    Raises:
        UnsupportedError: `hf_config.model_type` is not exactly that of a family, or none of the
            architectures is one of the family's.
    """
    model_type = getattr(hf_config, "model_type", None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if hf_config is None:
        what = f"a {architectures[0]}" if architectures else "something"
        raise UnsupportedError(
            f"The model is {what} without a config of transformers, whose model_type says which "
            f"model it is; give prepare a transformers model of type {', '.join(sorted(FAMILIES))}."
        )
    if family is None:
        raise UnsupportedError(
            f"{type(hf_config).__name__}.model_type is {model_type!r}; supported are "
            f"{', '.join(sorted(FAMILIES))}.{_hint(model_type)}"
        )
    named = architectures if architectures is not None else _architectures_of(hf_config)
    if named and not set(named) & set(family.architectures):
        raise UnsupportedError(
            f"The model is a {named[0]}; for model_type {family.model_type!r} the supported "
            f"architecture is {', '.join(family.architectures)}."
        )
    return family


def _architectures_of(hf_config: Any) -> Sequence[str]:
    """What the config says it was saved as; a config made in code says nothing."""
    return getattr(hf_config, "architectures", None) or ()


def _hint(model_type: object) -> str:
    if model_type in NEAR_FAMILIES:
        return f" {model_type} is not among them: {NEAR_FAMILIES[str(model_type)]}."
    close = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
