"""`AbstractTrainStep`: what a train step offers to the training engine."""

from __future__ import annotations

import argparse
import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.generic import ModelOutput

BatchFunction = Callable[[Iterator[Any]], Any]
ForwardStepFunction = Callable[[Iterator[Any], Any], tuple[Any, Callable[..., Any]]]
LossFunction = Callable[..., tuple[Any, ...]]


class StepArguments(argparse.Namespace):
    """The resolved run under the names of Megatron's arguments, as train steps see it. Read-only.

    `consumed_train_samples` goes up with the updates; all else stays as it was at `prepare`.
    """

    def __init__(self, accelerator: Any, view: Mapping[str, Any]) -> None:
        """Show `view`.

        Args:
            accelerator: The `Accelerator`, for steps whose constructor takes `args` alone.
            view: The run by Megatron's names.
        """
        self.__dict__.update(view)
        self.__dict__["_accelerator"] = accelerator

    def __getattr__(self, name: str) -> Any:
        """Say which names are near one that is not there."""
        near = difflib.get_close_matches(name, vars(self), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "vars(args) lists its names."
        raise AttributeError(f"args has no {name!r}; {hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a change, which would have no effect."""
        raise AttributeError(
            f"args.{name} cannot be set: args shows how the run was resolved. Set the field of "
            "MegatronLMPlugin, or other_megatron_args, before prepare."
        )

    def __delattr__(self, name: str) -> None:
        """Refuse it, as `__setattr__`."""
        self.__setattr__(name, None)

    def count_samples(self, number: int) -> None:
        """Add samples to `consumed_train_samples`."""
        self.__dict__["consumed_train_samples"] += number


def accelerator_and_args(accelerator: Any, args: Any) -> tuple[Any, Any]:
    """Return the `Accelerator` and the run's settings that a constructor was given.

    The settings may come first and alone, and have the `Accelerator` with them; None: not given.
    """
    if isinstance(accelerator, StepArguments):
        return vars(accelerator)["_accelerator"], accelerator
    return accelerator, args


def call_either_way(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a `get_*_func` method with `arguments`, or in the documented short form without."""
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return method()
    return method(*arguments)


class AbstractTrainStep(ABC):
    """The three functions that Megatron's schedule needs, for one kind of model.

    A subclass of one's own sets `self.get_batch`, `self.loss_func` and `self.forward_step`
    from the three methods, as the built-in steps do.

    Attributes:
        name: For messages.
        batch_keys: Keys of a batch that the step reads. A batch with another key is
            refused, since it would have no effect. None: any key.
        splits_sequences: Whether every tensor [b, s, ...] that `get_batch` returns holds one
            entry per token, so that context parallelism can cut it along s.
        required_keys: Keys that a batch must have.
        model_output_class: What transformers' model of the kind returns; ours has the loss in it.
    """

    batch_keys: tuple[str, ...] | None = None
    splits_sequences: bool = False
    required_keys: tuple[str, ...] = ("input_ids", "labels")
    model_output_class: type[ModelOutput] = CausalLMOutput

    get_batch: BatchFunction
    loss_func: LossFunction
    forward_step: ForwardStepFunction

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def begin(  # noqa: B027  # not abstract: most steps need nothing
        self,
        batch: Mapping[str, Any],
        sum_over_replicas: Callable[[Any], Any],
    ) -> None:
        """See the whole batch of a step, before its micro-batches. Every rank calls it.

        Args:
            batch: This replica's rows, [num_micro_batches x micro-batch, ...].
            sum_over_replicas: Adds up a tensor over the data-parallel ranks.
        """

    def _take_functions(
        self, accelerator: Any, of_loss: tuple[Any, ...] = (), of_step: tuple[Any, ...] = ()
    ) -> None:
        """Set the three functions: the plugin's custom ones, else those that the methods return.

        `get_loss_func` is given `of_loss` besides, `get_forward_step_func` is given `of_step`.
        """
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_get_batch_function is not None:
            self.batch_keys, self.required_keys = None, ("input_ids",)
        self.get_batch = plugin.custom_get_batch_function or call_either_way(
            self.get_batch_func, accelerator, plugin.megatron_dataset_flag
        )
        self.loss_func = plugin.custom_loss_function or call_either_way(
            self.get_loss_func, accelerator, *of_loss
        )
        self.forward_step = call_either_way(self.get_forward_step_func, *of_step)

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> BatchFunction:
        """Return a function (data iterator) -> what `forward_step` unpacks."""

    @abstractmethod
    def get_forward_step_func(self) -> ForwardStepFunction:
        """Return a function (data iterator, model chunk) -> (output, loss function of it)."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> LossFunction:
        """Return a function (loss mask, output) -> (loss, report) or (loss, tokens, report)."""
