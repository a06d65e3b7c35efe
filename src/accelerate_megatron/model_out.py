"""The methods of `Accelerator` that hand out the model: itself, as a state dict, as a folder."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.training.model import MegatronModel


class HandsOutModel:
    """`unwrap_model`, `get_state_dict` and `save_model` of an `Accelerator`."""

    _given: weakref.ref[torch.nn.Module] | None = None
    _running: Any

    def _prepared_of(self, given: torch.nn.Module) -> MegatronModel:
        """Return the prepared model, and remember which one it was made of."""
        self._given = weakref.ref(given)
        prepared: MegatronModel = self._running.model
        return prepared

    def unwrap_model(self, model: torch.nn.Module, *_args: Any, **_kwargs: Any) -> Any:
        """Return the prepared model itself: it has `save_pretrained` and `config`.

        Also for the model that `prepare` was given, whose own weights are those of before.
        """
        was_given = self._given is not None and self._given() is model
        return self._running.model if was_given else model

    def get_state_dict(
        self, model: MegatronModel, unwrap: bool = True
    ) -> dict[str, torch.Tensor] | None:
        """Return the Hugging Face state dict on the main rank, None elsewhere; all call it."""
        state: dict[str, torch.Tensor] | None = self.unwrap_model(model).gather_state_dict()
        return state

    def save_model(
        self,
        model: MegatronModel,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model as `model.save_pretrained` does; every rank calls it.

        Raises:
            UnsupportedError: `safe_serialization` is off.
        """
        if not safe_serialization:
            raise UnsupportedError(
                "save_model got safe_serialization=False, but weights are written as safetensors "
                "only; leave it out."
            )
        self.unwrap_model(model).save_pretrained(save_directory, max_shard_size=max_shard_size)
