"""What `MegatronLMDummyDataLoader` is told, by Megatron's names, and the rules about it. No torch.

How large each split is comes from the plugin and the schedule; which tokens are in the files is
looked at where they are opened (`engine/datasets.py`).
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate_megatron.config.masked_data import MaskedData
from accelerate_megatron.config.plugin_fields import FIELD
from accelerate_megatron.errors import ConfigurationError, UnsupportedError

SPLITS = ("train", "validation", "test")
DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's own default of `split`."""

DEFAULT_SEED = 1234
"""Megatron's own default of `seed`."""

_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
_DEFAULTS: dict[str, Any] = {
    "data_path": None,
    **dict.fromkeys(_PATHS),
    "split": None,
    "splits_string": None,
    "seq_length": None,
    "micro_batch_size": None,
    "seed": None,
    "eod_mask_loss": None,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "create_attention_mask": True,
    "data_cache_path": None,
    "mmap_bin_files": True,
    "num_workers": 0,
    "eval_iters": None,
    "eval_interval": None,
    "train_iters": None,
    "eod_token_id": None,
    "tokenizer_type": None,
    "tokenizer_model": None,
    "mask_prob": None,
    "short_seq_prob": None,
    "data_impl": "mmap",
    "megatron_dataset_flag": True,
}
_BOOLS = (
    "reset_position_ids",
    "reset_attention_mask",
    "create_attention_mask",
    "mmap_bin_files",
)
_OTHER_NAMES = {"create_attention_mask_in_dataloader": "create_attention_mask"}
_ABOUT_DATASETS = ("eval_iters", "eval_interval", "custom_megatron_datasets_provider_function")
_TOKENIZERS = ("vocab_file", "merge_file", "vocab_size")


@dataclass(frozen=True)
class Blend:
    """Indexed datasets that are mixed: their prefixes, and how much is taken of each.

    Without weights all of each is used, once for each epoch.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class IndexedData:
    """The resolved settings of one dummy loader.

    Attributes:
        blend: What all splits are cut from; None when each has its own.
        blends: Those of each split; used when `blend` is None.
        split: The shares of the splits, one number each, by Megatron's form; None with `blends`.
        sizes: Samples of each split; None: as many as one epoch has.
        windows: Samples of one iteration over each split; None: all of them.
        eod_token: The id of the end-of-document token, if it is known.
        cache: Folder of the sample indices; None: next to each dataset.
        masked: How samples are masked, BERT's and T5's; None: they are read on.
    """

    blend: Blend | None
    blends: tuple[Blend | None, ...]
    split: str | None
    seq_length: int
    micro_batch_size: int
    seed: int = DEFAULT_SEED
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    cache: str | None = None
    mmap_bin_files: bool = True
    num_workers: int = 0
    eod_token: int | None = None
    vocab_size: int | None = None
    masked: MaskedData | None = None
    sizes: tuple[int | None, ...] = (None, None, None)
    windows: tuple[int | None, ...] = (None, None, None)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each split in a common blend; 1 or 0 where each has its own."""
        if self.split is not None:
            return split_shares(self.split)
        return tuple(float(blend is not None) for blend in self.blends)


def data_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's data arguments with those given in them, by Megatron's names.

    Raises:
        ConfigurationError: A name is unknown; the text has the nearest ones.
        UnsupportedError: A format or kind of data that is not read here.
    """
    arguments = dict(_DEFAULTS)
    for name, value in given.items():
        known = _OTHER_NAMES.get(name, name)
        if name in _TOKENIZERS:
            raise UnsupportedError(
                f"MegatronLMDummyDataLoader got {name}; the files hold token ids already. Leave it "
                "out; for the masked samples of BERT and T5 give tokenizer_model, the folder of a "
                "transformers tokenizer."
            )
        if known not in arguments:
            raise ConfigurationError(
                f"MegatronLMDummyDataLoader got {name}={value!r}, which is no data argument; "
                f"{_nearest(name, arguments)}."
            )
        arguments[known] = value
    if arguments["data_impl"] not in ("mmap", "infer"):
        raise UnsupportedError(
            f"data_impl is {arguments['data_impl']!r}; only the memory-mapped format, 'mmap', is "
            "read. Build the dataset again with accelerate-megatron data build."
        )
    return arguments


def resolve_indexed_data(arguments: Mapping[str, Any], plugin: Any) -> IndexedData:
    """Return the settings that arguments and plugin make together; sizes are not among them.

    Raises:
        ConfigurationError: All that does not fit.
    """
    problems = [*_number_problems(arguments, plugin), *_bool_problems(arguments)]
    blend: Blend | None = None
    blends: tuple[Blend | None, ...] = ()
    split: str | None = None
    try:
        blend, blends, split = _resolve_blends(arguments)
    except ConfigurationError as error:
        problems.append(str(error))
    if arguments["reset_attention_mask"] and not arguments["create_attention_mask"]:
        problems.append(
            "reset_attention_mask hides documents from each other with a mask, but "
            "create_attention_mask is False. Set it to True."
        )
    if problems:
        raise ConfigurationError.of(problems)
    masks_eod = arguments["eod_mask_loss"]
    return IndexedData(
        blend=blend,
        blends=blends,
        split=split,
        seq_length=arguments["seq_length"] or _plugin_length(plugin),
        micro_batch_size=arguments["micro_batch_size"],
        seed=_seed(arguments, plugin),
        eod_mask_loss=plugin.eod_mask_loss if masks_eod is None else masks_eod,
        reset_position_ids=arguments["reset_position_ids"],
        reset_attention_mask=arguments["reset_attention_mask"],
        cache=arguments["data_cache_path"],
        mmap_bin_files=arguments["mmap_bin_files"],
        num_workers=arguments["num_workers"],
        eod_token=arguments["eod_token_id"],
    )


def unused_field_problems(plugin: Any) -> list[str]:
    """Return which of the plugin's fields have no effect where no indexed dataset is prepared.

    A field that a dummy loader has set, for a model that is gone, was not asked for.
    """
    names = [*_ABOUT_DATASETS]
    if plugin.custom_train_step_class is None:  # whose get_batch_func is told the flag
        names.append("megatron_dataset_flag")
    asked = [
        name
        for name in names
        if getattr(plugin, name) != FIELD[name].default and name not in plugin.set_by_datasets
    ]
    if not asked:
        return []
    return [
        f"The plugin has {' and '.join(asked)}, about the datasets of a MegatronLMDummyDataLoader, "
        f"and prepare got none. Give prepare one in the call with the model, or leave "
        f"{'it' if len(asked) == 1 else 'them'} out: evaluations of ordinary DataLoaders are the "
        "script's own."
    ]


def with_sizes(
    data: IndexedData,
    *,
    train_samples: int | None,
    global_batch_size: int,
    eval_iters: int,
    eval_interval: int,
) -> IndexedData:
    """Return `data` with the number of samples of each split, as Megatron counts them.

    Validation has `eval_iters` steps for each evaluation that a training with one every
    `eval_interval` updates has, and one more.

    Raises:
        ConfigurationError: Weights are given, but how long is trained is not known.
    """
    weighted = [blend for blend in (data.blend, *data.blends) if blend and blend.weights]
    if train_samples is None and weighted:
        raise ConfigurationError(
            f"data_path has the weights {', '.join(f'{w:g}' for w in weighted[0].weights or ())}, "
            "but how many samples are to be mixed is not known. Set MegatronLMPlugin(train_iters="
            "...) or train_samples, or total_num_steps of MegatronLMDummyScheduler."
        )
    updates = math.ceil((train_samples or 0) / global_batch_size)
    window = eval_iters * global_batch_size
    num_evaluations = updates // eval_interval + 1
    return replace(
        data,
        sizes=(train_samples, num_evaluations * window, window),
        windows=(None, window, window),
    )


def split_shares(split: str) -> tuple[float, ...]:
    """Return the three shares that "969, 30, 1" stands for, of sum 1.

    Raises:
        ConfigurationError: It is no list of up to three numbers, not all 0.
    """
    try:
        numbers = [float(part) for part in str(split).split(",")]
    except ValueError:
        numbers = []
    is_good = 0 < len(numbers) <= len(SPLITS) and all(
        number >= 0 and math.isfinite(number) for number in numbers
    )
    if not is_good or not sum(numbers):
        raise ConfigurationError(
            f"split is {split!r}; it has to be the shares of train, validation and test, such as "
            f"{DEFAULT_SPLIT!r} or '90, 10, 0'."
        )
    numbers += [0.0] * (len(SPLITS) - len(numbers))
    return tuple(number / sum(numbers) for number in numbers)


def read_blend(path: Any, name: str = "data_path") -> Blend:
    """Return the blend of a prefix, a list of prefixes, or a list of weights and prefixes.

    Raises:
        ConfigurationError: It is none of them.
    """
    items = [path] if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(items, Sequence) or not items:
        raise ConfigurationError(
            f"{name} is {path!r}; it has to be a prefix, a list of prefixes, or weights and "
            "prefixes in turn: [0.3, 'a', 0.7, 'b']."
        )
    words = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in items]
    weights = [_as_number(word) for word in words[::2]]
    has_weights = len(words) % 2 == 0 and None not in weights
    prefixes = words[1::2] if has_weights else words
    wrong = [word for word in prefixes if not isinstance(word, str) or not word.strip()]
    if (
        not has_weights
        and not wrong
        and len(words) % 2 == 0
        and any(w is not None for w in weights)
    ):
        wrong = [word for word in words[::2] if _as_number(word) is None]
    if wrong:
        raise ConfigurationError(
            f"{name} holds {wrong[0]!r} where a weight or a prefix is expected: give all datasets "
            "weights, [0.3, 'a', 0.7, 'b'], or none."
        )
    if not has_weights:
        return Blend(tuple(word.strip() for word in prefixes))
    numbers = tuple(float(weight) for weight in weights if weight is not None)
    if any(not weight > 0 or not math.isfinite(weight) for weight in numbers):
        raise ConfigurationError(
            f"{name} has the weights {list(numbers)}; each has to be above 0. Leave out a dataset "
            "of which nothing is to be used."
        )
    return Blend(tuple(word.strip() for word in prefixes), numbers)


def _resolve_blends(
    arguments: Mapping[str, Any],
) -> tuple[Blend | None, tuple[Blend | None, ...], str | None]:
    own = [name for name in _PATHS if arguments[name]]
    split, other = arguments["split"], arguments["splits_string"]
    if split is not None and other is not None and split_shares(split) != split_shares(other):
        raise ConfigurationError(
            f"split is {split!r} and splits_string {other!r}; both name the same shares. Give one."
        )
    split = other if split is None else split
    if arguments["data_path"] and own:
        raise ConfigurationError(
            f"data_path and {own[0]} were given: either all splits are cut from data_path, or each "
            "has its own path."
        )
    if arguments["data_path"]:
        split = DEFAULT_SPLIT if split is None else split
        split_shares(split)
        return read_blend(arguments["data_path"]), (None,) * len(SPLITS), split
    if not own:
        raise ConfigurationError(
            "MegatronLMDummyDataLoader needs data_path, or train_data_path, valid_data_path and "
            "test_data_path: the prefixes of .bin and .idx files."
        )
    if split is not None:
        raise ConfigurationError(
            f"split={split!r} cuts data_path up, but each split was given its own path. Leave it "
            "out."
        )
    blends = tuple(read_blend(arguments[n], n) if arguments[n] else None for n in _PATHS)
    return None, blends, None


def _plugin_length(plugin: Any) -> Any:
    return plugin.seq_length or plugin.encoder_seq_length


def _seed(arguments: Mapping[str, Any], plugin: Any) -> int:
    """Return what the shuffling starts from: the argument, Megatron's `seed`, or its default."""
    if arguments["seed"] is not None:
        return int(arguments["seed"])
    return int((plugin.other_megatron_args or {}).get("seed", DEFAULT_SEED))


def _number_problems(arguments: Mapping[str, Any], plugin: Any) -> list[str]:
    problems = []
    for name, least, fallback in (
        ("seq_length", 1, _plugin_length(plugin)),
        ("micro_batch_size", 1, None),
        ("num_workers", 0, None),
    ):
        value = arguments[name] if arguments[name] is not None else fallback
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            problems.append(
                f"MegatronLMDummyDataLoader has {name}={value!r}; it has to be a whole number, "
                f"{least} or more."
            )
    return problems


def _bool_problems(arguments: Mapping[str, Any]) -> list[str]:
    return [
        f"MegatronLMDummyDataLoader has {name}={arguments[name]!r}; it has to be True or False."
        for name in (*_BOOLS, "eod_mask_loss")
        if not isinstance(arguments[name], bool)
        and not (name == "eod_mask_loss" and arguments[name] is None)
    ]


def _as_number(word: Any) -> float | None:
    try:
        return float(word)
    except (TypeError, ValueError):
        return None


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
