"""From a resolved run to the objects that `prepare` returns."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accelerate_megatron import engine
from accelerate_megatron.config.encoder_decoder_rules import stack_lengths
from accelerate_megatron.config.logging import resolve_logging
from accelerate_megatron.config.resolve import nearest_choices
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.config.view import check_consumed_samples, consumed_samples
from accelerate_megatron.data.collate import BatchShape
from accelerate_megatron.data.indexed_samples import Windows
from accelerate_megatron.data.order import check_dataloader, micro_batch_size_of, samplers_of
from accelerate_megatron.data.rebatch import with_micro_batch_size
from accelerate_megatron.data.replica import ReplicaPlace
from accelerate_megatron.failures import on_every_rank
from accelerate_megatron.training.batches import BatchGate
from accelerate_megatron.training.context import check_splits_sequences
from accelerate_megatron.training.indexed import (
    IndexedDataLoader,
    IndexedLoaders,
    MegatronLMDummyDataLoader,
    ResolveAlike,
)
from accelerate_megatron.training.loader import PreparedDataLoader
from accelerate_megatron.training.model import MegatronModel
from accelerate_megatron.training.model_kinds import batch_rules, built_in_step
from accelerate_megatron.training.optimizer import PreparedOptimizer
from accelerate_megatron.training.resolve import ResolvedModel
from accelerate_megatron.training.scheduler import PreparedScheduler
from accelerate_megatron.training.session import TrainingSession
from accelerate_megatron.training.tracking import TrainingLog
from accelerate_megatron.training.train_step import AbstractTrainStep, StepArguments
from accelerate_megatron.weights.holders import gather_objects
from accelerate_megatron.weights.importing import import_weights
from accelerate_megatron.weights.initialised import InitialisedSource
from accelerate_megatron.weights.source import LiveSource

Loader = TypeVar("Loader", bound=PreparedDataLoader)
T = TypeVar("T")


class Assembly:
    """The running parts of one prepared model, on this rank."""

    def __init__(self, accelerator: Any, resolved: ResolvedModel) -> None:
        """Build everything. Every rank calls it, with equal settings.

        Args:
            accelerator: The `Accelerator`, given to train steps.
            resolved: The run, and where its weights come from.
        """
        device = accelerator.device
        plugin = accelerator.state.megatron_lm_plugin
        run = resolved.run
        if "seed" not in plugin.routed_arguments.of("run"):
            run = replace(run, seed=_seed_of_first_rank())
        handler = accelerator.init_handler
        self.ranks = engine.start_groups(
            run.layout,
            run.layout.chunks_per_stage(run.shape.num_layers),
            timeout=handler and handler.timeout,
        )
        self.step_arguments = StepArguments(accelerator, {**resolved.view, "seed": run.seed})
        step = _alike(lambda: self._train_step(accelerator, plugin, run))  # before the weights
        randomness = engine.ModelRandomness(run.seed, self.ranks, device)
        # Building draws numbers, on the host too, though importing overwrites them.
        with torch.random.fork_rng(devices=[]), randomness.active():
            chunks = _chunks_with_weights(resolved, run, plugin, device)
        self.session = TrainingSession(run, self.ranks, chunks, step, randomness, device)
        self._gate = BatchGate(run, self.ranks, device, step)
        self.model = MegatronModel(self.session, resolved, self._gate)
        self.model.meter.listeners.append(
            lambda record: self.step_arguments.count_samples(record.num_samples)
        )
        logging = resolve_logging(plugin)
        self.log = None if logging is None else TrainingLog(logging, self.session)
        if self.log is not None:
            self.model.meter.listeners.append(self.log)
        self.optimizer = PreparedOptimizer(self.session)
        self.scheduler = PreparedScheduler(self.session.scheduler)
        self._lengths = stack_lengths(plugin)
        self._consumed = consumed_samples(plugin)
        self._indexed = IndexedLoaders(accelerator)

    def _train_step(self, accelerator: Any, plugin: Any, run: RunConfig) -> AbstractTrainStep:
        built_in = built_in_step(run.shape)
        step = make_train_step(accelerator, plugin, self.step_arguments, built_in)
        check_splits_sequences(
            step,
            run.layout.cp_size,
            lambda: nearest_choices(
                run.layout,
                run.shape,
                plugin,
                run.num_micro_batches,
                also=lambda other: other.cp_size == 1,
            ),
        )
        return step

    def indexed_loader(
        self, dummy: MegatronLMDummyDataLoader, resolve_alike: ResolveAlike
    ) -> IndexedDataLoader:
        """Return the loader of the next split of `dummy`. Every rank calls it."""
        is_fetching = self.replica.is_fetching
        split = self._indexed.next(dummy, resolve_alike, is_fetching=is_fetching)
        prepared = self._wrapped(split, IndexedDataLoader, seq_length=None)
        prepared.is_endless = getattr(split.sampler, "is_windowed", False)
        return prepared

    def check_loaders(self, loaders: Iterable[DataLoader[Any]]) -> None:
        """Refuse DataLoaders that `loader` could not wrap in this order; nothing is fetched.

        Raises:
            ConfigurationError: One cannot give batches of the run's micro-batch size, or its
                consumed samples are no whole number of steps.
        """
        for position, loader in enumerate(loaders):
            check_dataloader(loader)
            size = self.session.run.micro_batch_size or micro_batch_size_of(loader)
            with_micro_batch_size(loader, size)
            samples = replace(self.session.run, micro_batch_size=size).global_batch_size
            check_consumed_samples(self._consumed[position : position + 1], samples)

    def loader(self, loader: DataLoader[Any]) -> PreparedDataLoader:
        """Return `loader` as this data-parallel rank's, its batches checked and broadcast."""
        return self._wrapped(loader, PreparedDataLoader, seq_length=self._lengths[0])

    def _wrapped(
        self, loader: DataLoader[Any], kind: type[Loader], *, seq_length: int | None
    ) -> Loader:
        run = self.session.run
        size = run.micro_batch_size or micro_batch_size_of(loader)
        prepared = kind(
            with_micro_batch_size(loader, size),
            groups=self.replica,
            shape=BatchShape(
                num_micro_batches=run.num_micro_batches,
                micro_batch_size=size,
                seq_length=seq_length,
                decoder_seq_length=self._lengths[1],
                pad_to_multiple_of=run.layout.sequence_multiple,
                **batch_rules(run.shape),
            ),
            limits=self._gate.limits,
            device=self.session.device,
        )
        if self._consumed:
            skip_samples(prepared, self._consumed.pop(0))
        return prepared

    @property
    def replica(self) -> ReplicaPlace:
        """The ranks that get the same batches as this one."""
        fetch_rank = self.ranks.fetch_rank
        return ReplicaPlace(
            dp_rank=self.ranks.dp_rank,
            dp_size=self.ranks.dp_size,
            dp_group=self.ranks.dp_group,
            replica_group=self.ranks.replica_group,
            fetch_rank=fetch_rank,
            is_fetching=dist.get_rank() == fetch_rank,
        )


def skip_samples(loader: PreparedDataLoader, consumed: int) -> None:
    """Let the first epoch of `loader` begin after `consumed` samples; whole epochs count nothing.

    Raises:
        ConfigurationError: They are no whole number of steps; `prepare` has looked before.
    """
    check_consumed_samples([consumed], loader.total_batch_size)
    steps = consumed // loader.total_batch_size
    for sampler in samplers_of(loader.dataloader):
        if isinstance(sampler, Windows):
            sampler.leave_out(steps // max(len(loader), 1))
    with contextlib.suppress(TypeError):  # an iterable dataset has no length: it is one epoch
        steps %= max(len(loader), 1)
    if steps:
        loader.skip_to(steps)


def make_train_step(
    accelerator: Any,
    plugin: Any,
    args: StepArguments,
    built_in: type[AbstractTrainStep],
) -> AbstractTrainStep:
    """Return the `built_in` train step, or the plugin's `custom_train_step_class`.

    A class is constructed in whichever of the two documented forms its constructor takes:
    `(accelerator, args, **kwargs)` or `(args, **kwargs)`.
    """
    step_class = plugin.custom_train_step_class
    if step_class is None:
        step_class = built_in
    kwargs = dict(plugin.custom_train_step_kwargs or {})
    try:
        inspect.signature(step_class).bind(accelerator, args, **kwargs)
    except TypeError:
        arguments: tuple[Any, ...] = (args,)
    else:
        arguments = (accelerator, args)
    step: AbstractTrainStep = step_class(*arguments, **kwargs)
    return step


def _alike(make: Callable[[], T]) -> T:
    """Return what `make` does, which must not communicate; if it fails anywhere, all raise it."""
    made: list[T] = []
    on_every_rank(lambda: made.append(make()), gather_objects)
    return made[0]


def _chunks_with_weights(
    resolved: ResolvedModel, run: RunConfig, plugin: Any, device: torch.device
) -> list[torch.nn.Module]:
    provider = plugin.custom_model_provider_function
    prepare = plugin.custom_prepare_model_function
    if prepare is None:
        chunks = engine.build_chunks(run, device, provider=provider)
    else:
        chunks = engine.prepared_chunks(run, prepare, provider)
    weights = resolved.weights
    if isinstance(weights.source, InitialisedSource):
        weights.source.seed = run.seed
    shards = engine.model_shards(chunks)
    shows_progress = not isinstance(weights.source, LiveSource)
    _alike(
        lambda: import_weights(
            shards, weights.source, weights.table, run.shape, shows_progress=shows_progress
        )
    )
    if prepare is not None:
        return chunks
    if run.optimizer is not None:
        engine.freeze(chunks, run.optimizer.group_of)
    return engine.wrap_chunks(chunks, run)


def _seed_of_first_rank() -> int:
    """Return the first rank's torch seed: what the user's `set_seed` set there."""
    seed = [torch.initial_seed() % 2**31]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]
