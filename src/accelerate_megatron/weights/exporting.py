"""A Megatron model back to Hugging Face: a state dict, or a folder that transformers loads."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.bars import progress_bar
from accelerate_megatron.weights.gathering import GatherPlan, make_plan, stream_hf_tensors
from accelerate_megatron.weights.hf_folder import (
    ShardedWriter,
    folder_problem,
    room_problem,
    shard_size_bytes,
    split_into_files,
    staged,
)
from accelerate_megatron.weights.holders import ModelHolders
from accelerate_megatron.weights.placements import placements
from accelerate_megatron.weights.shards import ParameterShard

FLOAT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def float_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype that a name like "float32" or "torch.float32" stands for.

    Raises:
        ConfigurationError: It is none of the three that weights are saved in.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in FLOAT_DTYPES:
        known = ", ".join(FLOAT_DTYPES)
        raise ConfigurationError(f"dtype is {dtype!r}; it must be one of {known}.")
    return FLOAT_DTYPES[name]


@dataclass(frozen=True, kw_only=True)
class FolderContents:
    """What a Hugging Face folder holds besides weights. Only the writer's is used."""

    hf_config: Any
    """The model's config; it is copied, not changed."""
    architecture: str
    """The class that loads the folder, for `config.architectures`."""
    generation_config: Any = None
    tokenizer: Any = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a folder is written. The same on every rank."""

    dtype: torch.dtype | None = None
    """Of the tensors; None: that of the shards."""
    max_shard_size: int | str = "5GB"
    """Largest size of one file."""
    overwrite: bool = True
    """Whether a folder that already holds a model may be overwritten, as in transformers."""


def gather_state_dict(
    shards: Iterable[ParameterShard],
    *,
    table: Mapping[str, Parameter],
    shape: ModelShape,
    dtype: torch.dtype | None = None,
    ranks: ModelHolders | None = None,
) -> dict[str, torch.Tensor] | None:
    """Return all Hugging Face tensors, on the CPU of the last rank; None on the other ranks.

    Every rank must call it. A tied output layer is not in it: it is the embedding.

    Raises:
        WeightsError: The shards of all ranks do not make up the model; on every rank.
    """
    ranks, shards = ranks or ModelHolders(), list(shards)
    plan = make_plan(shards, placements(table, shape), dtype=dtype, ranks=ranks)
    gathered: dict[str, torch.Tensor] = {}
    for tensors in stream_hf_tensors(shards, plan, ranks):
        gathered.update(tensors)
    return gathered if ranks.is_writer else None


def save_hf_folder(
    directory: str | os.PathLike[str],
    shards: Iterable[ParameterShard],
    *,
    table: Mapping[str, Parameter],
    shape: ModelShape,
    contents: FolderContents,
    options: ExportOptions | None = None,
    ranks: ModelHolders | None = None,
) -> None:
    """Write a folder that transformers loads. Every rank must call it; the last one writes.

    The writer never holds more of other ranks' weights than one file and the tensors of one
    Megatron parameter. When a rank returns, the folder is complete.

    Raises:
        ConfigurationError: `max_shard_size` is not a size, `directory` is a file or a model
            that may not be overwritten, or the disk has too little room; on every rank.
        WeightsError: The shards of all ranks do not make up the model; on every rank.
        OSError, RuntimeError: The writer failed; on every rank. Errors of a kind that not every
            rank knows become RuntimeError.
    """
    options, ranks, shards = options or ExportOptions(), ranks or ModelHolders(), list(shards)
    max_bytes = shard_size_bytes(options.max_shard_size)
    directory = Path(directory)
    ranks.on_writer(lambda: _refuse(folder_problem(directory, overwrite=options.overwrite)))
    plan = make_plan(shards, placements(table, shape), dtype=options.dtype, ranks=ranks)
    ranks.on_writer(lambda: _refuse(room_problem(directory, plan.hf_tensors())))
    stream = stream_hf_tensors(shards, plan, ranks)
    ranks.on_writer(
        lambda: _write(directory, stream, plan, contents, max_bytes),
        meanwhile=lambda: _exhaust(stream),
    )


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ConfigurationError(problem)


def _write(
    directory: Path,
    stream: Iterator[Mapping[str, torch.Tensor]],
    plan: GatherPlan,
    contents: FolderContents,
    max_bytes: int,
) -> None:
    try:
        with staged(directory) as staging:
            _write_contents(staging, contents, next(iter(plan.hf_tensors().values()))[1])
            writer = ShardedWriter(staging, split_into_files(plan.hf_tensors(), max_bytes))
            bar = progress_bar(stream, "saving weights", total=len(plan.pieces))
            for tensors in bar:
                writer.add(tensors)
            writer.finish()
    finally:
        # After an error the other ranks still wait for the writer to take their pieces.
        _exhaust(stream)


def _write_contents(staging: Path, contents: FolderContents, dtype: torch.dtype) -> None:
    config = copy.deepcopy(contents.hf_config)
    config.architectures = [contents.architecture]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(staging)
    if contents.generation_config is not None:
        contents.generation_config.save_pretrained(staging)
    if contents.tokenizer is not None:
        contents.tokenizer.save_pretrained(staging)


def _exhaust(stream: Iterator[Mapping[str, torch.Tensor]]) -> None:
    for _ in stream:
        pass
