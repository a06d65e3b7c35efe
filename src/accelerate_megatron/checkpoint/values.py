"""Values as JSON: random states and what else of ours is no tensor of the model."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from accelerate_megatron.errors import CheckpointError

_TENSOR = "__tensor__"
_ARRAY = "__array__"
_TUPLE = "__tuple__"


def to_json(value: Any) -> Any:
    """Return `value` in dicts with text keys, lists, numbers and texts.

    Tensors, NumPy arrays and tuples are marked, so that `from_json` gives them back.

    Raises:
        TypeError: It holds something else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        raw = array.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: _text(raw), "dtype": str(array.dtype), "shape": list(array.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {_ARRAY: _text(value.tobytes()), "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__qualname__} cannot be kept as JSON")


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given.

    Raises:
        CheckpointError: A marked value is damaged.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        if _TENSOR in value:
            raw = bytearray(base64.b64decode(value[_TENSOR], validate=True))
            dtype = _dtypes()[value["dtype"]]
            return torch.frombuffer(raw, dtype=dtype).reshape(value["shape"])
        if _ARRAY in value:
            array = np.frombuffer(
                base64.b64decode(value[_ARRAY], validate=True), dtype=np.dtype(value["dtype"])
            )
            return array.reshape(value["shape"]).copy()
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"A saved array is damaged: {error}") from error
    if _TUPLE in value:
        return tuple(from_json(item) for item in value[_TUPLE])
    return {key: from_json(item) for key, item in value.items()}


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _dtypes() -> dict[str, torch.dtype]:
    named = (getattr(torch, name) for name in dir(torch))
    return {str(found): found for found in named if isinstance(found, torch.dtype)}
