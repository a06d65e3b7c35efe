"""Checkpoints that Megatron-LM itself wrote in its `torch_dist` format: the weights of the model.

    FOLDER/latest_checkpointed_iteration.txt    "10", or "release"
    FOLDER/iter_0000010/                        metadata.json .metadata __0_0.distcp common.pt ...

Tensors have the names that ours have too. `common.pt` holds Megatron-LM's arguments, of which those
that change what the weights mean are compared.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from accelerate_megatron import engine
from accelerate_megatron.checkpoint.capture import COMMON_PT
from accelerate_megatron.checkpoint.comparing import differences, saved_shapes, shown
from accelerate_megatron.checkpoint.safe import METADATA_NAME, load_torch_file, read_metadata
from accelerate_megatron.checkpoint.storage import TensorReader, read_tensors
from accelerate_megatron.checkpoint.together import on_every_rank
from accelerate_megatron.errors import CheckpointError, CheckpointMismatchError
from accelerate_megatron.log import get_logger, is_logging_rank

logger = get_logger(__name__)

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"^iter_\d{7,}$")
_STACKED = "decoder.layers.self_attention."
"""How names begin when the layers are one tensor, with a dimension for the layer in front."""
_NO_WEIGHTS = ("optimizer", "chained_", "rng_state", "rerun_state")
"""How names begin that are no weights: optimizer, random states, state of Megatron-LM's loop."""

_SAME_NAMES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "normalization",
)


class _Word:
    """Stands for a constant of Megatron-LM's, which says nothing here; making one does nothing."""

    def __new__(cls, *_args: Any) -> _Word:
        return super().__new__(cls)


_ALLOWED_NAMES = (
    "megatron.core.enums.ModelType",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "signal.Signals",
)
"""What Megatron-LM's arguments may hold besides plain values and dtypes."""


def find_megatron_lm(path: Path) -> Path | None:
    """Return the folder of Megatron-LM's checkpoint at `path`; None without one. On one rank.

    Args:
        path: Megatron-LM's `--save` folder, or the folder of one iteration in it.

    Raises:
        CheckpointError: It is one, but not in the format torch_dist, or incomplete.
    """
    tracker = path / TRACKER_NAME
    folder = path
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if word != "release" and not (word.isascii() and word.isdecimal()):
            raise CheckpointError(
                f"{tracker} says {word[:40]!r}; it must be the number of an iteration, or release."
            )
        folder = path / (word if word == "release" else f"iter_{int(word):07d}")
    elif not (path / "metadata.json").is_file() or not (path / COMMON_PT).is_file():
        return None
    _check_format(folder)
    return folder


def _check_format(folder: Path) -> None:
    try:
        content = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        backend = content["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        backend = None
    if backend != "torch_dist" or not (folder / METADATA_NAME).is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint of Megatron-LM's in the format torch_dist (metadata.json "
            f"says {backend!r}). Let Megatron-LM convert it: --ckpt-convert-format torch_dist."
        )


def load_megatron_lm(accelerator: Any, folder: Path, *, allow_pickle: bool = False) -> str:
    """Load the weights and the number of updates; return the folder. Every rank calls it.

    Optimizer and schedule start anew, which the plugin has to say.

    Raises:
        CheckpointMismatchError: It is of another model, or the optimizer is wanted.
        CheckpointError: It is damaged or incomplete.
        UnsafeCheckpointError: It holds what could run code.
    """
    session = accelerator._running.session
    if session.optimizer is not None and not accelerator.state.megatron_lm_plugin.no_load_optim:
        raise CheckpointMismatchError(
            f"{folder} is a checkpoint of Megatron-LM's, of which the weights are loaded and "
            "the optimizer is not, but an optimizer was prepared. Set "
            "MegatronLMPlugin(no_load_optim=True) to start it and its schedule anew."
        )
    read: list[tuple[Metadata, dict[str, Any]]] = []
    on_every_rank(lambda: read.append(read_megatron_lm(folder, allow_pickle=allow_pickle)))
    metadata, common = read[0]
    shapes = {
        name: shape
        for name, shape in saved_shapes(metadata).items()
        if not name.startswith(_NO_WEIGHTS)
    }
    pieces = engine.pieces_to_load(
        session.chunks,
        None,
        keeps_main_parameters=True,
        saved_names=set(shapes),
        has_stacked_layers=any(name.startswith(_STACKED) for name in shapes),
    )
    _check_same_model(folder, session.run.shape, common, shapes, pieces)
    on_every_rank(lambda: read_tensors(pieces, TensorReader(folder, metadata)))
    if session.optimizer is not None:
        session.optimizer.reload_model_params()
    session.num_updates = int(common.get("iteration", 0))
    if is_logging_rank():
        logger.info(
            "Loaded the weights of %s, Megatron-LM's, after %d updates.",
            folder,
            session.num_updates,
        )
    return str(folder)


def find_iterations(parent: Path) -> list[Path]:
    """Return the folders of iterations in Megatron-LM's `--save` folder, oldest first."""
    if not (parent / TRACKER_NAME).is_file():
        return []
    return sorted(
        path
        for path in parent.iterdir()
        if path.is_dir() and (_ITERATION.match(path.name) or path.name == "release")
    )


def read_megatron_lm(
    folder: Path, *, allow_pickle: bool = False
) -> tuple[Metadata, dict[str, Any]]:
    """Return the index of the tensors, checked against the files, and what `common.pt` holds.

    Args:
        folder: Of one iteration.
        allow_pickle: Let the files run code.

    Raises:
        CheckpointError: It is damaged or incomplete.
        UnsafeCheckpointError: It holds what could run code.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not there, and rank 0 sees it: the folder is not shared by all machines."
        )
    metadata = read_metadata(folder, allow_pickle=allow_pickle)
    words: list[Any] = [(_Word, name) for name in _ALLOWED_NAMES]
    with torch.serialization.safe_globals([argparse.Namespace, *words]):
        common = load_torch_file(folder / COMMON_PT, allow_pickle=allow_pickle)
    if not isinstance(common, dict) or not isinstance(common.get("iteration", 0), int):
        raise CheckpointError(
            f"{folder / COMMON_PT} is damaged: it holds no dict of Megatron-LM's."
        )
    return metadata, common


def told_arguments(common: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron-LM's arguments that are plain values; empty where there are none."""
    args = common.get("args")
    given = vars(args) if isinstance(args, argparse.Namespace) else {}
    return {
        name: value
        for name, value in sorted(given.items())
        if value is None or isinstance(value, (bool, int, float, str))
    }


def _check_same_model(
    folder: Path,
    shape: Any,
    common: dict[str, Any],
    saved: dict[str, tuple[int, ...]],
    pieces: engine.TensorPieces,
) -> None:
    wanted = {name: size for part in on_every_rank(pieces.shapes) for name, size in part.items()}
    lines = argument_differences(common.get("args"), shape)
    lines += differences(saved, wanted, with_optimizer=False)
    lines += [
        f"{name}: {saved[name][0]} rows in the checkpoint, and the vocabulary has "
        f"{shape.vocab_size}"
        for name, (_, is_padded) in wanted.items()
        if is_padded and name in saved and saved[name][0] < shape.vocab_size
    ]
    if lines:
        raise CheckpointMismatchError(f"{folder} is of another model:{shown(lines)}")


def argument_differences(args: Any, shape: Any) -> list[str]:
    """Return which of Megatron-LM's arguments say another model than `shape`, one line each.

    Args:
        args: Megatron-LM's `args`; None, or what is no Namespace, says nothing.
        shape: The model's `ModelShape`.
    """
    given = vars(args) if isinstance(args, argparse.Namespace) else {}
    here = {name: getattr(shape, name) for name in _SAME_NAMES}
    here["position_embedding_type"] = shape.position_embedding
    here["swiglu"] = shape.gated_mlp and shape.activation == "silu"
    here["norm_epsilon"] = here["layernorm_epsilon"] = shape.norm_epsilon
    if shape.position_embedding == "rope":
        here["rotary_base"] = float(shape.rope_parameters.get("rope_theta", 10000.0))
    if given.get("group_query_attention"):
        here["num_query_groups"] = shape.num_query_groups
    return [
        f"{name} is {value!r} here and {given[name]!r} in the checkpoint"
        for name, value in here.items()
        if given.get(name) is not None and given[name] != value
    ]
