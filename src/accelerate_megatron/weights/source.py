"""Where Hugging Face tensors are read from."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Protocol

import torch
from torch import nn

from accelerate_megatron.errors import WeightsError

_SAMPLED_VALUES = 64


class TensorSource(Protocol):
    """Named Hugging Face tensors, readable slice by slice."""

    @property
    def label(self) -> str:
        """What to call this source in an error message."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors; one that is tied to another appears once."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return `tensor[index]`, one slice per dim; it may be a view and must not be written."""

    def digest(self) -> str:
        """Return what is equal on two ranks if their sources are, as far as it can be told fast."""


class LiveSource:
    """The parameters of a Hugging Face model in memory, and the buffers that are saved with them.

    Those are the correction biases of routers. The other buffers (masks, rotary frequencies)
    follow from the config. A tied output layer is the embedding itself, and torch lists it once,
    under the embedding's name.
    """

    def __init__(self, model: nn.Module, *, left_out: Collection[str] = ()) -> None:
        """Take the parameters of `model`, without copying them.

        Args:
            model: The model.
            left_out: Names of parameters that are not taken.

        Raises:
            WeightsError: Parameters have no values (meta device) or are not floating point.
        """
        values = {**dict(model.named_parameters()), **saved_buffers(model)}
        self._parameters = {name: value for name, value in values.items() if name not in left_out}
        self._label = f"the {type(model).__name__}"
        empty = [name for name, value in self._parameters.items() if value.is_meta]
        if empty:
            raise WeightsError(
                f"{len(empty)} parameters of {self.label} are on the meta device and have no "
                f"values ({empty[0]}, ...), the others have some. Load or initialise all of them."
            )
        whole = [
            f"{name} ({value.dtype})"
            for name, value in self._parameters.items()
            if not value.is_floating_point()
        ]
        if whole:
            raise WeightsError(
                f"{len(whole)} parameters of {self.label} are not floating point: "
                f"{', '.join(whole)}. Load the model without quantisation."
            )

    @property
    def label(self) -> str:
        """What to call this source in an error message."""
        return self._label

    def names(self) -> Collection[str]:
        """Return the names of all parameters."""
        return self._parameters.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter."""
        return tuple(self._parameters[name].shape)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a view of a parameter, cut out of any autograd graph."""
        return self._parameters[name].detach()[index]

    def digest(self) -> str:
        """Return a digest of some values of every parameter.

        Every rank takes its slices from its own copy of the model, so copies that differ (made
        without a common seed) would give a model that nobody made.
        """
        digest = hashlib.blake2b(digest_size=8)
        for name, parameter in self._parameters.items():
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            values = parameter.detach().flatten()
            sample = values[:: max(1, values.numel() // _SAMPLED_VALUES)].float().cpu()
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()


def is_on_meta(model: nn.Module) -> bool:
    """Whether no parameter has values; a model with some is refused by `LiveSource`."""
    return all(parameter.is_meta for parameter in model.parameters())


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating-point buffers of a model that its state dict holds, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
    }
