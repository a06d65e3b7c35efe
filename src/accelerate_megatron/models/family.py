"""What a model family has to declare. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Family:
    """One Hugging Face `model_type`: its config and its parameters, translated.

    Attributes:
        model_type: `config.model_type`, matched exactly.
        architectures: Class names of the Hugging Face models this stands for.
        shape: Translates a Hugging Face config, whose `architectures` say which class the model
            is where a family has several. Raises `UnsupportedError`, naming the
            config's field and value, for what the engine cannot represent.
        parameters: The table, by canonical Megatron name, for a shape. `{layer}` in a
            name stands for the layer's index. It has the names of a model in memory.
        disk_rows: The rows of the table that are others in safetensors files, of a family whose
            models rename or fuse tensors while they load.
        base_prefix: What the names of the model without its head lack: transformers loads a
            folder that was saved from a `GPT2Model` into a `GPT2LMHeadModel`.
        disk_extras: Regular expressions of names in files that hold no weights, such as the
            masks of old GPT-2 folders. They are passed over; any other unknown name is an error.
        disk_copies: Names in files of tensors that the model has under another name, by that
            name. Both have to be equal.
        narrowed_init: Regular expressions of names that a new model starts with a deviation of
            initializer_range / sqrt(2 * layers).
        deviations: Deviations of a new model's tensors by regular expressions of their names,
            first match wins, for a family that does not start all of them alike.
        left_out: Hugging Face names of tensors that a model of the family has and the run does
            not: its positions, where it gets others (`models/forced_rotary.py`).
    """

    model_type: str
    architectures: tuple[str, ...]
    shape: Callable[[Any], ModelShape]
    parameters: Callable[[ModelShape], Mapping[str, Parameter]]
    disk_rows: Mapping[str, Parameter] = field(default_factory=dict)
    base_prefix: str = "model"
    disk_extras: tuple[str, ...] = ()
    disk_copies: Mapping[str, str] = field(default_factory=dict)
    narrowed_init: tuple[str, ...] = ()
    deviations: Callable[[ModelShape], Mapping[str, float]] | None = None
    left_out: tuple[str, ...] = ()

    def disk_table(self, shape: ModelShape) -> Mapping[str, Parameter]:
        """Return the table of the names in files, for a shape."""
        return {**self.parameters(shape), **self.disk_rows}
