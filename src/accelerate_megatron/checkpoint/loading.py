"""`load_state`: one rank decides which checkpoint, all check it, then all read their parts.

Nothing of the training state is touched before the checkpoint has been found whole, safe and of
this model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from accelerate_megatron import engine
from accelerate_megatron.checkpoint import folders
from accelerate_megatron.checkpoint.capture import COMMON_NAME, COMMON_PT
from accelerate_megatron.checkpoint.comparing import (
    differences,
    saved_shapes,
    setting_differences,
    shown,
)
from accelerate_megatron.checkpoint.description import has_same_ranks
from accelerate_megatron.checkpoint.manifest import (
    TENSORS,
    Manifest,
    file_problems,
    read_manifest,
)
from accelerate_megatron.checkpoint.megatron_lm import find_megatron_lm, load_megatron_lm
from accelerate_megatron.checkpoint.run_state import (
    put_back_common,
    put_back_loaders,
    put_back_random,
    put_back_random_of_other_layout,
)
from accelerate_megatron.checkpoint.safe import load_torch_file, read_metadata
from accelerate_megatron.checkpoint.saving import automatic_parent
from accelerate_megatron.checkpoint.storage import TensorReader, read_tensors
from accelerate_megatron.checkpoint.together import on_every_rank, on_first_rank, run_hooks
from accelerate_megatron.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigurationError,
)
from accelerate_megatron.log import get_logger, is_logging_rank

logger = get_logger(__name__)

AUTO = "auto"
"""As `input_dir`: the newest good checkpoint of the project, or a fresh start without any."""


@dataclass(frozen=True)
class _Source:
    """The checkpoint that is loaded; the same on all ranks."""

    checkpoint: Path
    manifest: Manifest

    @property
    def data(self) -> Path:
        return self.checkpoint / self.manifest.folder


@dataclass
class _Content:
    """What was read before anything is changed."""

    metadata: Metadata
    pieces: engine.TensorPieces
    common: dict[str, Any]
    own: dict[str, Any]
    has_own_place: bool
    registered: list[Any]
    with_optimizer: bool


def load_state(
    accelerator: Any, input_dir: str | os.PathLike[str] | None, *, allow_pickle: bool = False
) -> str | None:
    """Load a checkpoint and return its folder. Every rank calls it.

    Args:
        accelerator: The `Accelerator` with a prepared model.
        input_dir: The checkpoint's folder, or one of Megatron-LM's own; None for the newest one of
            the project that is good; `AUTO` for the same, returning None when there is none at all.
        allow_pickle: Let the files run code: only for files of one's own.

    Raises:
        CheckpointError: There is none, or it is damaged or incomplete.
        CheckpointMismatchError: It is of another model, or without the optimizer.
        UnsafeCheckpointError: It holds what could run code.
        ConfigurationError: No folder is known; or the position in the data does not fit.
    """
    session = accelerator._running.session
    accelerator._background_save.wait()
    source: _Source | None
    if input_dir is None or input_dir == AUTO:
        source = _newest(accelerator, may_be_none=input_dir == AUTO)
        if source is None:
            return None
    else:
        path = Path(os.path.abspath(input_dir))
        foreign = on_first_rank(lambda: find_megatron_lm(path))
        if foreign is not None:
            return load_megatron_lm(accelerator, foreign, allow_pickle=allow_pickle)
        source = on_first_rank(lambda: _Source(path, read_manifest(path)))
        problems = _problems(source)
        if problems:
            raise CheckpointError(_damaged(source, problems))
    content = _read_small_parts(accelerator, session, source, allow_pickle=allow_pickle)
    hooks = accelerator._load_model_state_pre_hook.values()
    run_hooks([partial(hook, accelerator._models, str(source.data)) for hook in hooks])
    folder = source.data / TENSORS
    on_every_rank(lambda: read_tensors(content.pieces, TensorReader(folder, content.metadata)))
    on_every_rank(lambda: _put_back(accelerator, session, content))
    number = folders.number_of(source.checkpoint)
    if number is not None:
        accelerator.project_configuration.iteration = number + 1
    if is_logging_rank():
        logger.info("Loaded %s, after %d updates.", source.checkpoint, session.num_updates)
    return str(source.checkpoint)


def _newest(accelerator: Any, *, may_be_none: bool) -> _Source | None:
    """Return the newest checkpoint that is whole on all ranks; None for a fresh start."""
    parent, candidates, unreadable = on_first_rank(lambda: _search(accelerator))
    for source in candidates:
        problems = _problems(source)
        if not problems:
            return source
        _warn("%s The checkpoint before it is tried.", _damaged(source, problems))
    # A fresh start would go on saving there, and retention would delete what may yet be saved.
    if candidates or unreadable or not may_be_none:
        reasons = [f"{path}: {problem}" for path, problem in unreadable.items()]
        raise CheckpointError(
            f"{parent} holds no checkpoint that can be loaded"
            + (": all of them are damaged." if candidates or unreadable else ".")
            + "".join(f"\n  - {reason}" for reason in reasons)
        )
    return None


def _search(accelerator: Any) -> tuple[Path, list[_Source], dict[str, str]]:
    """Return the folder of checkpoints, and those in it, newest first. On rank 0.

    The last value is those whose manifest cannot be read, with the reason.
    """
    if accelerator.project_dir is None:
        raise ConfigurationError(
            "load_state was called without a folder and no project_dir is set; give one of them."
        )
    parent = automatic_parent(accelerator)
    for path in folders.find_unfinished(parent):
        logger.warning("Ignored %s, a save that was interrupted before it was complete.", path)
    found, unreadable = [], {}
    for item in reversed(folders.find_checkpoints(parent)):
        if item.manifest is None:
            logger.warning("Ignored %s: %s", item.path, item.problem)
            unreadable[str(item.path)] = str(item.problem)
        else:
            found.append(_Source(item.path, item.manifest))
    return parent, found, unreadable


def _problems(source: _Source) -> list[str]:
    """Return what is wrong with the files, of which each rank checks a part."""

    def check() -> list[str]:
        try:
            seen = read_manifest(source.checkpoint)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Rank 0 sees it: the folder is not shared by all machines."
            ) from error
        if seen.checkpoint_id != source.manifest.checkpoint_id:
            raise CheckpointError(
                f"{source.checkpoint} holds another checkpoint here than for rank 0: the folder "
                "is not shared by all machines."
            )
        names = sorted(source.manifest.files)
        mine = names[dist.get_rank() :: dist.get_world_size()]
        return file_problems(source.checkpoint, source.manifest, mine)

    return [problem for part in on_every_rank(check) for problem in part]


def _damaged(source: _Source, problems: list[str]) -> str:
    return f"{source.checkpoint} is damaged: {'; '.join(problems)}."


def _warn(message: str, *values: Any) -> None:
    if is_logging_rank():
        logger.warning(message, *values)


def _read_small_parts(
    accelerator: Any, session: Any, source: _Source, *, allow_pickle: bool
) -> _Content:
    """Read everything but the tensors, and compare; nothing is changed."""
    plugin = accelerator.state.megatron_lm_plugin
    with_optimizer = session.optimizer is not None and not plugin.no_load_optim
    has_own_place = has_same_ranks(dict(source.manifest.run), session.run)

    def read() -> _Content:
        _check_has(source, with_optimizer=with_optimizer)
        metadata = read_metadata(source.data / TENSORS, allow_pickle=allow_pickle)
        load_torch_file(source.data / TENSORS / COMMON_PT, allow_pickle=allow_pickle)
        rank = dist.get_rank() if has_own_place else 0
        common = _read_json(source.data / COMMON_NAME)
        for loader, state in zip(accelerator._dataloaders, common["loaders"], strict=False):
            loader.check_position(state)
        return _Content(
            metadata=metadata,
            pieces=engine.pieces_to_load(
                session.chunks,
                session.optimizer if with_optimizer else None,
                keeps_main_parameters=session.run.precision != "no",
                saved_names=set(saved_shapes(metadata)),
            ),
            common=common,
            own=_read_json(source.data / "ranks" / f"{rank:05d}.json"),
            has_own_place=has_own_place,
            registered=list(_registered(accelerator, source, allow_pickle=allow_pickle)),
            with_optimizer=with_optimizer,
        )

    contents: list[_Content] = []
    on_every_rank(lambda: contents.append(read()))
    content = contents[0]
    wanted = {
        name: shape for part in on_every_rank(content.pieces.shapes) for name, shape in part.items()
    }
    lines = setting_differences(source.manifest.run.get("model", {}), asdict(session.run.shape))
    lines += differences(saved_shapes(content.metadata), wanted, with_optimizer=with_optimizer)
    if lines:
        raise CheckpointMismatchError(
            f"{source.checkpoint} is a checkpoint of another model, or another optimizer:"
            f"{shown(lines)}"
        )
    return content


def _check_has(source: _Source, *, with_optimizer: bool) -> None:
    if with_optimizer and not source.manifest.has_optimizer:
        raise CheckpointMismatchError(
            f"{source.checkpoint} holds weights only (saved with no_save_optim), but an optimizer "
            "was prepared. Set MegatronLMPlugin(no_load_optim=True) to load the weights and start "
            "the optimizer and its schedule anew."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} and should hold a dict.")
    return content


def _registered(accelerator: Any, source: _Source, *, allow_pickle: bool) -> Iterator[Any]:
    """Return the states of the registered objects, in order."""
    saved = sum(name.startswith("custom_checkpoint_") for name in source.manifest.files)
    wanted = len(accelerator._custom_objects)
    if saved != wanted:
        raise CheckpointMismatchError(
            f"{source.checkpoint} holds the states of {saved} registered objects, and {wanted} are "
            "registered now; register the same ones with register_for_checkpointing, in the same "
            "order, before load_state."
        )
    for index in range(wanted):
        path = source.data / f"custom_checkpoint_{index}.pkl"
        yield load_torch_file(path, allow_pickle=allow_pickle)


def _put_back(accelerator: Any, session: Any, content: _Content) -> None:
    """Set all that is no tensor. The optimizer's numbers come before the schedule's."""
    if content.with_optimizer:
        engine.set_optimizer_numbers(session.optimizer, content.common["optimizer"])
    elif session.optimizer is not None:
        session.optimizer.reload_model_params()
    put_back_common(accelerator, session, content.common, with_scheduler=content.with_optimizer)
    if content.has_own_place:
        put_back_random(accelerator, session, content.own)
    else:
        put_back_random_of_other_layout(accelerator, session, content.common, content.own)
    put_back_loaders(
        accelerator,
        content.common["loaders"],
        content.own["boundaries"] if content.has_own_place else None,
    )
    for item, state in zip(accelerator._custom_objects, content.registered, strict=True):
        item.load_state_dict(state)
