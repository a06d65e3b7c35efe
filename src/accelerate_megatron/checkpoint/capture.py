"""What a save writes, taken from the run at one moment; afterwards the run may go on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelerate_megatron import engine
from accelerate_megatron.checkpoint.description import describe_run
from accelerate_megatron.checkpoint.manifest import TENSORS
from accelerate_megatron.checkpoint.run_state import (
    common_state,
    merge_optimizer_states,
    optimizer_state,
    rank_state,
)
from accelerate_megatron.checkpoint.safe import load_torch_file
from accelerate_megatron.checkpoint.staging import Staging
from accelerate_megatron.checkpoint.together import on_every_rank
from accelerate_megatron.errors import CheckpointError, UnsafeCheckpointError

COMMON_NAME = "run.json"
HF_FOLDER = "hf"
"""Folder of a checkpoint's state with the Hugging Face model's configs."""
COMMON_PT = "common.pt"
"""What Megatron-Core expects beside the tensors."""

_TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Capture:
    """This rank's part of a checkpoint.

    Attributes:
        pieces: The tensors; they share memory with the run unless they were staged.
        files: Path in the folder of the data -> content, of the files this rank writes.
        hooks: The user's, which write files of their own into the folder of the data.
        step: Updates done.
        has_optimizer: Whether the optimizer is part of it.
        run: What the run was, as `describe_run` has it.
    """

    pieces: engine.TensorPieces
    files: dict[str, bytes]
    hooks: list[Callable[[], Any]]
    step: int
    has_optimizer: bool
    run: dict[str, Any]


def capture_run(accelerator: Any, session: Any, data: Path, staging: Staging | None) -> Capture:
    """Take a checkpoint's content from the run. Every rank calls it.

    Args:
        accelerator: With a prepared model.
        session: The engine's side of it.
        data: The folder of the data, which hooks are given.
        staging: Copies the tensors; None lets them share memory with the run.

    Raises:
        CheckpointError: A registered object's state cannot be loaded safely.
    """
    plugin = accelerator.state.megatron_lm_plugin
    optimizer = None if plugin.no_save_optim else session.optimizer
    pieces = engine.pieces_to_save(
        session.chunks, optimizer, keeps_main_parameters=session.run.precision != "no"
    )
    numbers = on_every_rank(lambda: {} if optimizer is None else optimizer_state(session))
    files: dict[str, bytes] = {}

    def read_own() -> None:
        nonlocal pieces
        if staging is not None:
            pieces = staging.hold(pieces)
        files[f"ranks/{dist.get_rank():05d}.json"] = _json(rank_state(accelerator, session))
        if dist.get_rank() == 0:
            merged = None if optimizer is None else merge_optimizer_states(numbers)
            files.update(_common_files(accelerator, session, merged))

    on_every_rank(read_own)
    return Capture(
        pieces=pieces,
        files=files,
        hooks=[
            partial(hook, accelerator._models, [], str(data))
            for hook in accelerator._save_model_state_pre_hook.values()
        ],
        step=session.num_updates,
        has_optimizer=optimizer is not None,
        run=describe_run(session.run, dist.get_world_size()),
    )


def lasting_pieces_of(session: Any, *, has_optimizer: bool) -> engine.TensorPieces:
    """Return those of a save's pieces that share memory with the run. Every rank calls it."""
    return engine.lasting_pieces(
        session.chunks,
        session.optimizer if has_optimizer else None,
        keeps_main_parameters=session.run.precision != "no",
    )


def _common_files(
    accelerator: Any, session: Any, optimizer: dict[str, Any] | None
) -> dict[str, bytes]:
    """Return the files that the first rank writes."""
    files = {
        COMMON_NAME: _json({**common_state(accelerator, session), "optimizer": optimizer}),
        f"{TENSORS}/metadata.json": _json(_TORCH_DIST),
        f"{TENSORS}/{COMMON_PT}": _torch({"iteration": session.num_updates}),
    }
    # The model can be exported with nothing but its checkpoint.
    for name, config in accelerator._running.model.hf_configs.items():
        files[f"{HF_FOLDER}/{name}.json"] = _json(json.loads(config.to_json_string()))
    for index, item in enumerate(accelerator._custom_objects):
        files[f"custom_checkpoint_{index}.pkl"] = _registered(item)
    return files


def _registered(item: Any) -> bytes:
    """Return a registered object's state as a file, after reading it as a load will.

    Raises:
        CheckpointError: It holds more than tensors and plain values.
    """
    kind = type(item).__qualname__
    content = _torch(item.state_dict())
    try:
        load_torch_file(Path(f"the state of {kind}"), content=io.BytesIO(content))
    except UnsafeCheckpointError as error:
        raise CheckpointError(
            f"The state of the registered {kind} cannot be loaded safely: {error} Let its "
            "state_dict() return tensors, numbers, texts, lists and dicts only."
        ) from None
    return content


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, allow_nan=True).encode()


def _torch(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
