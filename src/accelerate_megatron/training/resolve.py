"""From the objects of a script to a resolved run. No communication, nothing is built."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate.utils import MegatronLMDummyScheduler as UpstreamDummyScheduler
from torch.utils.data import DataLoader

from accelerate_megatron import engine
from accelerate_megatron.config.argument_effects import (
    contradictions,
    with_arguments,
    with_zeros_counted,
)
from accelerate_megatron.config.arguments import Context, unmet_needs
from accelerate_megatron.config.attention import resolve_attention
from accelerate_megatron.config.expert_settings import expert_settings_problems
from accelerate_megatron.config.indexed_data import unused_field_problems
from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.logging import resolve_logging
from accelerate_megatron.config.memory_savers import resolve_recompute
from accelerate_megatron.config.nearest_settings import (
    Surroundings,
    nearest_settings,
    settings_problems,
)
from accelerate_megatron.config.plugin_fields import FIELDS
from accelerate_megatron.config.resolve import (
    model_problems,
    nearest_choices,
    resolve_micro_batch_size,
    resolve_shape,
)
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.config.view import (
    check_consumed_samples,
    consumed_samples,
    megatron_view,
)
from accelerate_megatron.data.order import check_dataloader, micro_batch_size_of
from accelerate_megatron.data.rebatch import with_micro_batch_size
from accelerate_megatron.errors import ConfigurationError, UnsupportedError
from accelerate_megatron.log import get_logger, log_once
from accelerate_megatron.models.family import Family
from accelerate_megatron.models.forced_rotary import without_learned_positions
from accelerate_megatron.models.parameters import Parameter
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.training.indexed import MegatronLMDummyDataLoader, check_indexed_data
from accelerate_megatron.training.optimizer_settings import (
    GroupConditions,
    kind_of,
    read_optimizer,
)
from accelerate_megatron.training.schedule_of_run import schedule_of_run
from accelerate_megatron.training.tracking import check_tensorboard
from accelerate_megatron.weights.choosing import ChosenWeights, choose_weights
from accelerate_megatron.weights.exporting import FolderContents
from accelerate_megatron.weights.placements import placements
from accelerate_megatron.weights.tying import as_tied_in

logger = get_logger(__name__)


@dataclass(frozen=True)
class Parts:
    """What was given to `prepare`, by kind."""

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    scheduler: UpstreamDummyScheduler | None
    loaders: tuple[DataLoader[Any], ...]
    dummy_loaders: tuple[MegatronLMDummyDataLoader, ...] = ()

    @property
    def train_loader(self) -> DataLoader[Any] | None:
        """The first DataLoader: Accelerate's convention for the one that is trained on."""
        return self.loaders[0] if self.loaders else None


@dataclass(frozen=True)
class ResolvedModel:
    """A run, and the correspondence of its weights."""

    run: RunConfig
    table: Mapping[str, Parameter]
    weights: ChosenWeights
    """Where the weights come from, and the table with the names they have there."""
    disk_table: Mapping[str, Parameter]
    """The table with the names that a Hugging Face folder has."""
    contents: FolderContents
    """What a Hugging Face folder of the model holds besides its weights."""
    view: Mapping[str, Any]
    """The run under the names of Megatron's arguments, for train steps."""
    left_out: tuple[str, ...] = ()
    """Tensors of the Hugging Face model that the run has no place for; see `Family.left_out`."""


def sort_objects(objects: Sequence[Any]) -> Parts:
    """Return the objects by kind.

    Raises:
        UnsupportedError: An object is of a kind that cannot be prepared; names it.
        ConfigurationError: There are two of a kind that there can be one of.
    """
    kinds: dict[str, list[Any]] = {
        kind: [] for kind in ("model", "optimizer", "scheduler", "loader", "dummy loader")
    }
    for position, item in enumerate(objects):
        kinds[_kind_of(item, position)].append(item)
    for kind in ("model", "optimizer", "scheduler"):
        if len(kinds[kind]) > 1:
            raise ConfigurationError(
                f"prepare got {len(kinds[kind])} {kind}s; Megatron trains one model with one "
                f"optimizer and one scheduler. Pass one {kind}."
            )
    first = {kind: items[0] if items else None for kind, items in kinds.items()}
    loaders = tuple(kinds["loader"]), tuple(kinds["dummy loader"])
    return Parts(first["model"], first["optimizer"], first["scheduler"], *loaders)


def _kind_of(item: Any, position: int) -> str:
    if isinstance(item, torch.nn.Module):
        return "model"
    if isinstance(item, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(item, UpstreamDummyScheduler):
        return "scheduler"
    if isinstance(item, DataLoader):
        return "loader"
    if isinstance(item, MegatronLMDummyDataLoader):
        return "dummy loader"
    what = f"argument {position + 1} of prepare is a {type(item).__module__}.{type(item).__name__}"
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
        raise UnsupportedError(
            f"{what}; Megatron steps its own scheduler, with the update. Pass "
            "MegatronLMDummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...) and "
            "set lr_decay_style and min_lr on the plugin."
        )
    raise UnsupportedError(
        f"{what}; a model, torch.optim's AdamW, Adam or SGD, MegatronLMDummyScheduler, "
        "DataLoaders and MegatronLMDummyDataLoader can be prepared."
    )


def resolve_model(
    parts: Parts,
    plugin: Any,
    layout: Layout,
    precision: str,
    num_micro_batches: int,
    *,
    weights: str | os.PathLike[str] | None,
    rank: int,
) -> ResolvedModel:
    """Decide everything about the run, from this rank's objects alone; no communication.

    Args:
        parts: The script's objects.
        plugin: The plugin.
        layout: The layout.
        precision: `mixed_precision`.
        num_micro_batches: Micro-batches of one update; see `resolve_num_micro_batches`.
        weights: A Hugging Face folder to take the weights from; see `choose_weights`.
        rank: This rank's number.

    Raises:
        ConfigurationError: Something does not fit; see the message.
        WeightsError: The weights are not those of the model's config.
    """
    model = parts.model
    for dummy in parts.dummy_loaders:
        dummy.set_megatron_data_args()
    if model is None:
        raise ConfigurationError("prepare needs the model; pass it in the first prepare call.")
    hf_config = getattr(model, "config", None)
    class_names = [cls.__name__ for cls in type(model).__mro__]
    family = family_of(hf_config, architectures=class_names)
    architecture = next(name for name in class_names if name in family.architectures)
    own = family.shape(named(hf_config, architecture))
    own = as_tied_in(model, family, own, weights)
    shape = resolve_shape(own, plugin)
    if shape.position_embedding != own.position_embedding:
        family = _with_forced_positions(family, own)
    _check_fit(parts, plugin, layout, shape, precision, num_micro_batches)
    table = family.parameters(shape)
    chosen = choose_weights(model, family, shape, weights, rank=rank, num_ranks=layout.world_size)
    run = _run(parts, plugin, layout, precision, num_micro_batches, shape, table)
    num_loaders = len(parts.loaders) + len(parts.dummy_loaders)
    check_consumed_samples(consumed_samples(plugin)[:num_loaders], run.global_batch_size)
    logging = resolve_logging(plugin)
    check_tensorboard(logging)
    if logging is not None and logging.num_zeros:
        run = with_zeros_counted(run)
    view = megatron_view(run, plugin, hf_config)
    for dummy in parts.dummy_loaders:
        if dummy.dataset_args["eod_token_id"] is not None:
            view["eos_token_id"] = dummy.dataset_args["eod_token_id"]
        check_indexed_data(dummy.resolve(plugin), plugin, view, shape.max_positions)
    if plugin.eod_mask_loss and view["eos_token_id"] is None and not parts.dummy_loaders:
        raise ConfigurationError(
            "eod_mask_loss needs to know the end-of-document token, but the model's config has no "
            "eos_token_id. Set it there, or in other_megatron_args."
        )
    _check_arguments(run, plugin, view)
    contents = FolderContents(
        hf_config=hf_config,
        architecture=architecture,
        generation_config=getattr(model, "generation_config", None),
    )
    return ResolvedModel(
        run, table, chosen, family.disk_table(shape), contents, view, family.left_out
    )


def _check_fit(
    parts: Parts,
    plugin: Any,
    layout: Layout,
    shape: ModelShape,
    precision: str,
    num_micro_batches: int,
) -> None:
    """Refuse a model, a layout and settings that do not go together, all problems at once."""
    problems = model_problems(layout, shape, plugin, num_micro_batches)
    advice = [nearest_choices(layout, shape, plugin, num_micro_batches)] if problems else []
    kind, decoupled = kind_of(parts.optimizer)
    around = Surroundings(
        layout=layout,
        shape=shape,
        optimizer_kind=kind,
        decoupled=decoupled,
        on_cuda=engine.active_device() == "cuda",
        has_fused_adam=engine.has_transformer_engine(),
    )
    problems += settings_problems(plugin, precision, around)
    advice.append(nearest_settings(plugin, precision, around))
    if not parts.dummy_loaders:
        problems += unused_field_problems(plugin)
    if problems:
        raise ConfigurationError.of(problems, advice=" ".join(filter(None, advice)) or None)


def _with_forced_positions(family: Family, own: ModelShape) -> Family:
    family = without_learned_positions(family, own)
    log_once(
        logger,
        "use_rotary_position_embeddings forces rotary positions: the learned ones of the "
        f"{own.model_type} model ({', '.join(family.left_out)}) are left out. save_pretrained is "
        "refused, since no class of transformers would load the folder as what it is; save_state "
        "keeps the model.",
        level=logging.WARNING,
    )
    return family


def named(hf_config: Any, architecture: str) -> Any:
    """Return a copy of a config that names the live model's class: it may name another one."""
    config = copy.copy(hf_config)
    config.architectures = [architecture]
    return config


def _check_arguments(run: RunConfig, plugin: Any, view: Mapping[str, Any]) -> None:
    context = Context(plugin, run.shape, run.precision, has_schedule=run.schedule is not None)
    problems = unmet_needs(context) + contradictions(context.routed, view)
    if problems:
        raise ConfigurationError.of(problems)


def _run(
    parts: Parts,
    plugin: Any,
    layout: Layout,
    precision: str,
    num_micro_batches: int,
    shape: ModelShape,
    table: Mapping[str, Parameter],
) -> RunConfig:
    micro_batch_size = _micro_batch_size(parts, plugin)
    run = RunConfig(
        layout=layout,
        shape=shape,
        precision=precision,  # type: ignore[arg-type]  # checked by check_precision
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        gradient_clipping=plugin.gradient_clipping,
        use_distributed_optimizer=plugin.use_distributed_optimizer,
        per_token_loss=plugin.calculate_per_token_loss,
        optimizer=None,
        schedule=None,
        seed=0,
        attention=resolve_attention(plugin),
        recompute=resolve_recompute(plugin),
        optimizer_cpu_offload=plugin.optimizer_cpu_offload,
        overlap_cpu_optimizer_d2h_h2d=plugin.overlap_cpu_optimizer_d2h_h2d,
        use_precision_aware_optimizer=plugin.use_precision_aware_optimizer,
        use_fsdp=plugin.use_custom_fsdp,
        return_logits=plugin.return_logits,
    )
    run = with_arguments(run, plugin.routed_arguments)
    problems = expert_settings_problems(run, seq_length=plugin.seq_length)
    if problems:
        nearest = nearest_choices(
            layout,
            shape,
            plugin,
            num_micro_batches,
            also=lambda other: (
                not expert_settings_problems(
                    replace(run, layout=other), seq_length=plugin.seq_length
                )
            ),
        )
        raise ConfigurationError.of(problems, advice=nearest)
    if parts.optimizer is None:
        if parts.scheduler is not None:
            raise ConfigurationError("prepare got a scheduler without its optimizer; pass both.")
        return run
    sources = {
        name: dict.fromkeys(segment.hf for segment in placement.segments)
        for name, placement in placements(table, shape).items()
    }
    assert parts.model is not None, "resolve_model refuses to do without"
    if shape.encoder is not None and shape.encoder.head == "none":
        raise UnsupportedError(
            f"prepare got an optimizer and a {type(parts.model).__name__}, which has no head and "
            "so no loss. Give it a model with one, such as BertForMaskedLM or "
            "BertForSequenceClassification, or leave the optimizer out."
        )
    optimizer = read_optimizer(
        parts.optimizer, parts.model, sources, conditions=GroupConditions.of(plugin)
    )
    run = replace(run, optimizer=optimizer)
    if parts.scheduler is None:
        return run
    schedule = schedule_of_run(parts.train_loader, parts.scheduler, plugin, run, optimizer)
    return replace(run, schedule=schedule)


def _micro_batch_size(parts: Parts, plugin: Any) -> int | None:
    loaders = parts.loaders
    for loader in loaders:
        check_dataloader(loader)
    indexed = [dummy.resolve(plugin).micro_batch_size for dummy in parts.dummy_loaders]
    size = resolve_micro_batch_size(
        [*map(micro_batch_size_of, loaders), *indexed], smallest=plugin.is_train_batch_min
    )
    for loader in loaders:
        with_micro_batch_size(loader, size or 0)  # only to refuse what cannot be rebatched
    return size


def settings_of(plugin: Any, precision: str, resolved: ResolvedModel | None) -> dict[str, Any]:
    """Return what must be equal on all ranks, by the name a user knows it by.

    Args:
        plugin: The plugin.
        precision: `mixed_precision`.
        resolved: The resolved run; None before there is one.
    """
    settings: dict[str, Any] = {field.name: getattr(plugin, field.name) for field in FIELDS}
    settings["mixed_precision"] = precision
    if resolved is None:
        return settings
    run = resolved.run
    settings["micro_batch_size"] = run.micro_batch_size
    settings |= {f"config.{name}": value for name, value in asdict(run.shape).items()}
    if run.optimizer is not None:
        settings["optimizer"] = run.optimizer.kind
        settings["decoupled_weight_decay"] = run.optimizer.decoupled_weight_decay
        settings["parameter groups"] = run.optimizer.groups
        settings["parameters by group"] = _digest(repr(sorted(run.optimizer.group_of.items())))
    settings["learning-rate schedule"] = run.schedule
    settings["weights of the model"] = resolved.weights.source.digest()
    return settings


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
