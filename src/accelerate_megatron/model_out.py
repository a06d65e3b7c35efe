"""The methods of `Accelerator` that hand out the model: itself, as a state dict, as a folder."""

from __future__ import annotations

import os
from typing import Any

import torch

from accelerate_megatron.errors import UnsupportedError
from accelerate_megatron.training.model import MegatronModel


class HandsOutModel:
    """`unwrap_model`, `get_state_dict` and `save_model` of an `Accelerator`."""

    def unwrap_model(self, model: torch.nn.Module, *_args: Any, **_kwargs: Any) -> torch.nn.Module:
        """Return the prepared model itself: it has `save_pretrained` and `config`."""
        return model

    def get_state_dict(
        self, model: MegatronModel, unwrap: bool = True
    ) -> dict[str, torch.Tensor] | None:
        """Return the Hugging Face state dict on the main rank, None elsewhere; all call it."""
        return model.gather_state_dict()

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
        model.save_pretrained(save_directory, max_shard_size=max_shard_size)
