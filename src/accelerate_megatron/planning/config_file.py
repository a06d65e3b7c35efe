"""Reading a model's config.json without transformers, which would import torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.planning.config_defaults import COMMON, DEFAULTS, derived_fields

_TWO_LABELS = ("LABEL_0", "LABEL_1")


class ConfigFile(SimpleNamespace):
    """The fields of a config.json as attributes."""


def read_config(path: Path) -> ConfigFile:
    """Return the config in a config.json, or in a folder that holds one.

    Rotary settings written by transformers 4 (`rope_theta`, `rope_scaling`) are returned
    as transformers 5 keeps them, in `rope_parameters`.

    Raises:
        ConfigurationError: There is no such file, or it is no config of a model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error.strerror}); give a config.json or a folder with one."
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{file} is no JSON ({error}); name the config.json of a model."
        ) from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ConfigurationError(f"{file} has no model_type; it is no config of a model.")
    values = {**COMMON, **DEFAULTS.get(content["model_type"], {}), **content}
    values |= derived_fields(values)
    if "max_position_embeddings" in values:
        values["rope_parameters"] = _rope_parameters(values)
    # transformers writes the labels' names, and counts them when it reads them.
    values.setdefault("num_labels", len(values.get("id2label") or _TWO_LABELS))
    if "num_local_experts" in values:  # transformers 5 writes it for Qwen3-MoE's `num_experts`
        values.setdefault("num_experts", values["num_local_experts"])
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    return ConfigFile(**values)


def _rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    given = values.get("rope_parameters") or {}
    scaling = dict(values.get("rope_scaling") or {})
    kind = scaling.pop("type", None)
    merged = {"rope_theta": values.get("rope_theta", 10000.0), **scaling, **given}
    if "partial_rotary_factor" in values:
        merged.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    merged.setdefault("rope_type", kind or "default")
    return merged
