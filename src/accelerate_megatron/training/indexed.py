"""Indexed datasets in a script: the stand-in it gives to `prepare`, and the loaders it gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import MegatronLMDummyDataLoader as UpstreamDummyLoader
from torch.utils.data import DataLoader, Dataset

from accelerate_megatron import engine
from accelerate_megatron.config.indexed_data import (
    SPLITS,
    IndexedData,
    data_arguments,
    resolve_indexed_data,
    with_sizes,
)
from accelerate_megatron.config.masked_data import resolve_masked_data
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.data.indexed_samples import IndexedSamples, Windows
from accelerate_megatron.data.loader import MegatronDataLoader
from accelerate_megatron.data.masked_samples import MaskedSamples
from accelerate_megatron.data.vocabulary import read_vocabulary
from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.log import get_logger
from accelerate_megatron.training.loader import PreparedDataLoader
from accelerate_megatron.training.model_kinds import masked_kind

logger = get_logger(__name__)

Provider = Callable[[Sequence[int | None]], Sequence[Any]]
"""From the sizes of three splits to their datasets."""

ResolveAlike = Callable[..., Any]
"""`agreement.resolve_alike`, handed in from above."""

_BUILD_SECONDS = 3600.0
"""Given to a rank to build the indices of its samples."""

_OF_PLUGIN = ("seq_length", "eod_mask_loss", "eval_iters", "eval_interval", "train_iters")


class MegatronLMDummyDataLoader(UpstreamDummyLoader):  # type: ignore[misc]  # accelerate is untyped
    """Stands for Megatron's indexed datasets in a script; `prepare` returns the real loaders.

    Prepared three times, in one call or in several, it gives the loaders of train, validation and
    test.

    Attributes:
        dataset_args: Megatron's data arguments by name.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        """Take Megatron's data arguments: data_path, split or splits_string, seq_length, ...

        Raises:
            ConfigurationError: An argument is unknown.
            UnsupportedError: It asks for a format or a tokenizer that is not read here.
        """
        self.dataset_args = data_arguments(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """Set the fields of the plugin that are data arguments too; `prepare` calls it.

        Raises:
            ConfigurationError: A value is out of range.
        """
        plugin = AcceleratorState().megatron_lm_plugin
        for name in _OF_PLUGIN:
            value, old = self.dataset_args[name], getattr(plugin, name)
            if value is not None and value != old:
                logger.info("MegatronLMDummyDataLoader sets %s from %s to %s.", name, old, value)
                setattr(plugin, name, value)
                plugin.set_by_datasets |= {name}
        if not plugin.megatron_dataset_flag:
            plugin.megatron_dataset_flag = True
            plugin.set_by_datasets |= {"megatron_dataset_flag"}
        plugin.check()

    def resolve(self, plugin: Any) -> IndexedData:
        """Return the settings, without sizes. Communicates with nobody.

        Raises:
            ConfigurationError: They do not fit.
        """
        return resolve_indexed_data(self.dataset_args, plugin)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Provider:
        """Return the function of three sizes that builds three datasets, on this rank alone."""
        plugin = accelerator.state.megatron_lm_plugin
        own: Provider | None = plugin.custom_megatron_datasets_provider_function
        return own or partial(_build, _data_of_run(self, accelerator))

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Return the three prepared loaders, as preparing it three times does."""
        return tuple(accelerator.prepare(self, self, self))


def _build(data: IndexedData, sizes: Sequence[int | None]) -> Sequence[Any]:
    data = replace(data, sizes=tuple(sizes))
    if data.masked is None:
        return engine.build_gpt_datasets(data)
    return engine.build_masked_datasets(data, read_vocabulary(data.masked))


def _data_of_run(dummy: MegatronLMDummyDataLoader, accelerator: Any) -> IndexedData:
    """Return the settings with what the model says: its tokens, and which masked samples."""
    plugin = accelerator.state.megatron_lm_plugin
    shape = accelerator._running.session.run.shape
    arguments = accelerator._running.step_arguments
    data, masked = dummy.resolve(plugin), None
    if plugin.custom_megatron_datasets_provider_function is None:
        kind = masked_kind(shape)
        masked = resolve_masked_data(kind, dummy.dataset_args, plugin, vars(arguments))
    eod: int | None = arguments.eos_token_id if data.eod_token is None else data.eod_token
    return replace(data, eod_token=eod, vocab_size=shape.vocab_size, masked=masked)


def check_indexed_data(
    data: IndexedData, plugin: Any, view: Mapping[str, Any], max_positions: int | None
) -> None:
    """Check what depends on the model. Communicates with nobody.

    Args:
        data: The settings.
        plugin: The plugin.
        view: The run by Megatron's names.
        max_positions: The model's; None for one whose positions have no end.

    Raises:
        ConfigurationError: Documents are to be told apart, but their end is not known; or samples
            are longer than the model's positions.
    """
    eod = view["eos_token_id"] if data.eod_token is None else data.eod_token
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if getattr(data, name) and eod is None:
            raise ConfigurationError(
                f"{name} needs to know the end-of-document token, but the model's config has no "
                "eos_token_id. Set it there, or give MegatronLMDummyDataLoader(eod_token_id=...)."
            )
    if max_positions is not None and data.seq_length > max_positions:
        raise ConfigurationError(
            f"seq_length is {data.seq_length}, but the model has {max_positions} positions. Set "
            f"seq_length to {max_positions} or less."
        )


class IndexedDataLoader(PreparedDataLoader):
    """One split of an indexed dataset, prepared: iterated by `for`, or with `next`.

    An iteration over train goes through all samples of the training; one over validation or test
    takes the next `eval_iters` steps.
    """

    _running: Iterator[dict[str, Any]] | None = None
    is_endless = False
    """Whether `next` goes on after the last step of an iteration."""

    def __next__(self) -> dict[str, Any]:
        """Return the next batch. Every rank must call it.

        Raises:
            StopIteration: The samples of the training are used up, or there are none.
        """
        for _ in range(2):
            if self._running is None:
                # Not Accelerate's active loader: it would stay that after the last `next`.
                self._running = MegatronDataLoader.__iter__(self)
            try:
                return next(self._running)
            except StopIteration:
                self._running = None
                if not self.is_endless:
                    break
        raise StopIteration

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a position over; see `MegatronDataLoader.load_state_dict`."""
        self._running = None
        super().load_state_dict(state)


@dataclass(frozen=True)
class IndexedSplits:
    """The datasets of one dummy loader, on the ranks that fetch, and their sizes on all."""

    data: IndexedData
    datasets: Sequence[Any]
    lengths: Sequence[int]
    pad: int = 0
    """The model's padding token, which masked samples are filled with."""
    are_own: bool = False
    """Whether the datasets are of a user's own function, and may draw random numbers."""

    def loader(self, number: int) -> DataLoader[Any]:
        """Return the plain DataLoader of split `number`."""
        length, data = self.lengths[number], self.data
        samples: Any = self._samples(number)
        samples.draws_nothing = not self.are_own
        return DataLoader(
            samples,
            batch_size=data.micro_batch_size,
            sampler=Windows(length, data.windows[number]),
            num_workers=data.num_workers,
            # Without one, starting an iteration would draw from the user's.
            generator=torch.Generator().manual_seed(data.seed),
        )

    def _samples(self, number: int) -> Dataset[Any]:
        dataset, length, data = self.datasets[number], self.lengths[number], self.data
        if data.masked is not None:
            return MaskedSamples(
                dataset, length, pad=self.pad, two_sentences=data.masked.two_sentences
            )
        numbering = None
        if data.reset_attention_mask and data.eod_token is not None:
            numbering = partial(engine.sequence_numbers, eod_token=data.eod_token)
        return IndexedSamples(
            dataset,
            length,
            keeps_positions=data.reset_position_ids,
            number_documents=numbering,
        )


def build_splits(
    dummy: MegatronLMDummyDataLoader,
    accelerator: Any,
    resolve_alike: ResolveAlike,
    *,
    is_fetching: bool,
) -> IndexedSplits:
    """Build the datasets: on the first rank, then on the others that fetch.

    Every rank calls it. No rank waits for one that has failed: each verdict is agreed on.

    Raises:
        ConfigurationError: The settings do not fit the data, on all ranks alike.
        DataFileError: A file is damaged, on all ranks alike.
    """
    plugin = accelerator.state.megatron_lm_plugin
    run: RunConfig = accelerator._running.session.run

    def resolve(settings: dict[str, Any]) -> IndexedData:
        dummy.set_megatron_data_args()
        data = _data_of_run(dummy, accelerator)
        view = vars(accelerator._running.step_arguments)
        check_indexed_data(data, plugin, view, run.shape.max_positions)
        # The model may have been prepared without any loader, and so without a micro-batch.
        size = run.micro_batch_size or data.micro_batch_size
        batch = size * run.num_micro_batches * run.layout.dp_size
        data = with_sizes(
            replace(data, micro_batch_size=size),
            train_samples=_train_samples(plugin, run, batch),
            global_batch_size=batch,
            eval_iters=plugin.eval_iters,
            eval_interval=plugin.eval_interval,
        )
        settings |= {f"MegatronLMDummyDataLoader.{k}": v for k, v in vars(data).items()}
        return data

    data: IndexedData = resolve_alike("indexed data", resolve)
    rank = dist.get_rank()

    def build(_settings: dict[str, Any]) -> Sequence[Any]:
        provider = dummy.get_train_valid_test_datasets_provider(accelerator)
        return _checked(provider(list(data.sizes)))

    def build_if(is_mine: bool) -> Callable[[dict[str, Any]], Sequence[Any] | None]:
        return build if is_mine else lambda _settings: None

    # The first rank writes the cache, which the others then read.
    first = resolve_alike("first rank's samples", build_if(rank == 0), _BUILD_SECONDS)
    is_other = is_fetching and rank != 0
    others = resolve_alike("other ranks' samples", build_if(is_other), _BUILD_SECONDS)
    datasets = first or others or (None,) * len(SPLITS)
    lengths = [[_length(d, size) for d, size in zip(datasets, data.sizes, strict=True)]]
    dist.broadcast_object_list(lengths, src=0)
    pad = accelerator._running.step_arguments.pad_token_id or 0
    is_own_class = type(dummy) is not MegatronLMDummyDataLoader
    are_own = is_own_class or plugin.custom_megatron_datasets_provider_function is not None
    return IndexedSplits(data, datasets, lengths[0], pad, are_own)


def _checked(datasets: Any) -> Sequence[Any]:
    has_three = isinstance(datasets, (list, tuple)) and len(datasets) == len(SPLITS)
    if not has_three or not all(isinstance(each, Sized | None) for each in datasets):
        raise ConfigurationError(
            "custom_megatron_datasets_provider_function returned "
            f"{type(datasets).__name__} where three datasets with a length are needed: train, "
            "validation, test (None for one without data)."
        )
    three: Sequence[Any] = datasets
    return three


def _length(dataset: Any, size: int | None) -> int:
    if dataset is None:
        return 0
    return len(dataset) if size is None else min(size, len(dataset))


def _train_samples(plugin: Any, run: RunConfig, global_batch_size: int) -> int | None:
    """Return the samples of the whole training; None when nothing says how long it is."""
    if plugin.train_samples is not None:
        return int(plugin.train_samples)
    if plugin.train_iters is not None:
        return int(plugin.train_iters) * global_batch_size
    if run.schedule is None or run.schedule.total_steps is None:
        return None
    updates = math.ceil(run.schedule.total_steps / run.schedule.steps_per_update)
    return updates * global_batch_size


class IndexedLoaders:
    """Gives the splits of each dummy loader, one at each call."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._built: dict[int, tuple[MegatronLMDummyDataLoader, IndexedSplits]] = {}
        self._num_given: dict[int, int] = {}

    def next(
        self, dummy: MegatronLMDummyDataLoader, resolve_alike: ResolveAlike, *, is_fetching: bool
    ) -> DataLoader[Any]:
        """Return the plain DataLoader of the next split. Every rank calls it.

        Raises:
            ConfigurationError: All three splits were given, or the data does not fit.
            DataFileError: A file is damaged.
        """
        number = self._num_given.get(id(dummy), 0)
        if number >= len(SPLITS):
            raise ConfigurationError(
                "The same MegatronLMDummyDataLoader was prepared a fourth time; it has three "
                f"splits, {', '.join(SPLITS)}. Keep the loaders of the first three times."
            )
        if number == 0:
            splits = build_splits(dummy, self._accelerator, resolve_alike, is_fetching=is_fetching)
            self._built[id(dummy)] = (dummy, splits)
        self._num_given[id(dummy)] = number + 1
        return self._built[id(dummy)][1].loader(number)
