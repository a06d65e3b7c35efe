"""Where the weights of a given model come from: memory, a folder, or initialisation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from accelerate_megatron.errors import WeightsError
from accelerate_megatron.log import get_logger, log_once
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.weights.checks import check_source
from accelerate_megatron.weights.folder_files import has_weights
from accelerate_megatron.weights.folder_source import FolderSource
from accelerate_megatron.weights.initialised import InitialisedSource
from accelerate_megatron.weights.placements import expected_hf_shapes
from accelerate_megatron.weights.segments import hf_names
from accelerate_megatron.weights.source import LiveSource, TensorSource, is_on_meta

logger = get_logger(__name__)


@dataclass(frozen=True)
class ChosenWeights:
    """A checked source, and the table that has its names."""

    source: TensorSource
    table: Mapping[str, Parameter]


def choose_weights(
    model: nn.Module,
    family: Family,
    shape: ModelShape,
    weights: str | os.PathLike[str] | None,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> ChosenWeights:
    """Return where the weights come from. Reads headers only; communicates with nobody.

    `weights` names a folder; without it, a model in memory is taken as it is, and a model on
    the meta device is read from the folder that its config came from, else initialised.

    Args:
        model: The Hugging Face model.
        family: Its family.
        shape: Its shape.
        weights: A folder, which comes before the values in memory.
        rank: This rank's number, for checks that the ranks share.
        num_ranks: How many ranks share them.

    Raises:
        WeightsError: The source does not fit the model; see `FolderSource` and `check_source`.
    """
    folder = folder_of(model, weights)
    if folder is not None:
        return open_folder(folder, family, shape, rank=rank, num_ranks=num_ranks)
    table = family.parameters(shape)
    if not is_on_meta(model):
        source = LiveSource(model, left_out=family.left_out)
        check_source(source, table, shape)
        return ChosenWeights(source, table)
    log_once(
        logger,
        f"The {type(model).__name__} is on the meta device and its config names no folder with "
        "weights: it is initialised with initializer_range "
        f"{shape.initializer_range}. To start from weights, pass prepare(..., weights=FOLDER), or "
        "load_state a checkpoint.",
    )
    fresh = InitialisedSource(
        expected_hf_shapes(table, shape),
        shape,
        narrowed=family.narrowed_init,
        zero_rows=_padding_rows(model),
        deviations=family.deviations(shape) if family.deviations else None,
    )
    return ChosenWeights(fresh, table)


def open_folder(
    folder: Path, family: Family, shape: ModelShape, *, rank: int = 0, num_ranks: int = 1
) -> ChosenWeights:
    """Return the weights in a folder, checked against the model.

    Raises:
        WeightsError: The folder holds another kind of model, or its tensors do not fit.
    """
    source, table = folder_source(folder, family, shape), family.disk_table(shape)
    check_source(source, table, shape)
    source.check_copies(rank=rank, num_ranks=num_ranks)
    return ChosenWeights(source, table)


def folder_source(folder: Path, family: Family, shape: ModelShape) -> FolderSource:
    """Return the weights in a folder, by the names that the model has.

    Raises:
        WeightsError: The folder holds another kind of model, or cannot be read.
    """
    _check_model_type(folder, family)
    tied = _tied_names(family, shape)
    return FolderSource(
        folder,
        expected=expected_hf_shapes(family.disk_table(shape), shape).keys() | tied.keys(),
        prefix=family.base_prefix,
        extras=(*family.disk_extras, *map(re.escape, family.left_out)),
        tied=tied,
    )


def folder_of(model: nn.Module, weights: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder that weights are read from; None: they are in memory, or initialised."""
    if weights is not None:
        return Path(weights)
    return _folder_of_config(model) if is_on_meta(model) else None


def _folder_of_config(model: nn.Module) -> Path | None:
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    folder = Path(name) if name else None
    return folder if folder is not None and has_weights(folder) else None


def _check_model_type(folder: Path, family: Family) -> None:
    path = folder / "config.json"
    if not path.is_file():
        return
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error}); copy or download it again.") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in (None, family.model_type):
        raise WeightsError(
            f"{path} is of a {model_type!r} model, and the model to be filled is of type "
            f"{family.model_type!r}; name the folder of a {family.model_type!r} model."
        )


def _tied_names(family: Family, shape: ModelShape) -> dict[str, str]:
    """Return the names that a folder may have besides the tensor that they are tied to."""
    if not shape.tied_embeddings:
        return dict(family.disk_copies)
    embedding = hf_names(family.disk_table(shape)["embedding.word_embeddings.weight"])[0]
    tied = expected_hf_shapes(family.disk_table(shape), shape)
    untied_shape = replace(shape, tied_embeddings=False)
    untied = expected_hf_shapes(family.disk_table(untied_shape), untied_shape)
    copies = {name: embedding for name in untied if name not in tied}
    return {**copies, **family.disk_copies}


def _padding_rows(model: nn.Module) -> dict[str, int]:
    return {
        f"{name}.weight": int(module.padding_idx)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }
