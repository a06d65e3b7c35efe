"""Mixture of experts without Transformer Engine."""

from __future__ import annotations

from accelerate_megatron.engine.patches.patch import Patch, When
from accelerate_megatron.engine.versions import Version

PATCHES = (
    Patch(
        module="megatron.core.transformer.moe.moe_utils",
        symbol="te_general_gemm",
        may_be=lambda found: found is None,
        may_be_text="a missing name",
        when=When.NO_TRANSFORMER_ENGINE,
        replace=lambda _missing: None,
        before=Version(0, 17, 0),
        why="the router asks whether it is None, but no line defines it: a NameError",
    ),
)
