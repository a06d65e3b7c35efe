"""Questions about the version of Transformer Engine where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_megatron.engine.patches.patch import Patch, When
from accelerate_megatron.engine.versions import Version


def _no_version_is_reached(_upstream: Any) -> Callable[..., bool]:
    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return False

    return is_te_min_version


PATCHES = (
    Patch(
        module="megatron.core.utils",
        symbol="is_te_min_version",
        parameters=("version", "check_equality"),
        when=When.NO_TRANSFORMER_ENGINE,
        replace=_no_version_is_reached,
        before=Version(0, 17, 0),
        why=(
            "without Transformer Engine it compares None with a version, a TypeError that ends "
            "BERT and the precision-aware optimizer"
        ),
    ),
)
