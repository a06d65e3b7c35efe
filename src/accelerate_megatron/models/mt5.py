"""mT5: a T5 v1.1 over many languages, whose decoder's output is never scaled.

Source: transformers 5.24, models/mt5/modeling_mt5.py and configuration_mt5.py.
"""

from __future__ import annotations

from typing import Any

from accelerate_megatron.models.family import Family
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.models.t5 import (
    EMBEDDING_COPIES,
    UNUSED_BIAS,
    encoder_decoder_shape,
    t5_deviations,
    t5_parameters,
)


def mt5_shape(config: Any) -> ModelShape:
    """Translate an `MT5Config`.

    Raises:
        UnsupportedError: The config asks for what the engine cannot represent.
        ConfigurationError: A field is missing.
    """
    return encoder_decoder_shape(config, "mt5", output_scale=1.0)


MT5 = Family(
    model_type="mt5",
    architectures=("MT5ForConditionalGeneration",),
    shape=mt5_shape,
    parameters=t5_parameters,
    disk_copies=EMBEDDING_COPIES,
    disk_extras=UNUSED_BIAS,
    deviations=t5_deviations,
)
