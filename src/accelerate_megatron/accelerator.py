"""`Accelerator`: Accelerate's, with Megatron-Core underneath.

Everything that Accelerate does without knowing the distributed type is inherited:
trackers, logging, project configuration, profiling. What is overridden, and why, is
listed in docs/design.md; tests/test_accelerate_contract.py fails when upstream changes it.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn

import accelerate
import torch

from accelerate_megatron import engine
from accelerate_megatron.agreement import agree, resolve_alike
from accelerate_megatron.between_ranks import BetweenRanks
from accelerate_megatron.checkpoint.accelerating import Checkpoints
from accelerate_megatron.checkpoint.saving import claim_checkpoint_folder
from accelerate_megatron.config.resolve import (
    check_precision,
    resolve_layout,
    resolve_num_micro_batches,
)
from accelerate_megatron.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from accelerate_megatron.faults.guards import Guards
from accelerate_megatron.faults.policy import FaultPolicy
from accelerate_megatron.model_out import HandsOutModel
from accelerate_megatron.notebook import say_how_to_get_more_ranks
from accelerate_megatron.plugin import MegatronLMPlugin
from accelerate_megatron.state import (
    OTHER_STRATEGIES,
    MeetingPlace,
    as_plugin,
    enter_megatron_state,
    meeting_place,
    refuse_other_strategies,
    rendezvous_advice,
    share_seed,
    start_process_group,
    start_restarted_group,
    take_accumulation,
    wants_cpu,
    without_upstream_megatron,
)
from accelerate_megatron.training.assemble import Assembly
from accelerate_megatron.training.indexed import MegatronLMDummyDataLoader
from accelerate_megatron.training.loader import PreparedDataLoader
from accelerate_megatron.training.model import MegatronModel
from accelerate_megatron.training.optimizer import PreparedOptimizer
from accelerate_megatron.training.resolve import (
    Parts,
    ResolvedModel,
    resolve_model,
    settings_of,
    sort_objects,
)
from accelerate_megatron.training.scheduler import PreparedScheduler

# Kept, since the drop-in makes the name in Accelerate's modules mean the class below.
_Upstream = accelerate.Accelerator
_PREPARED = (MegatronModel, PreparedOptimizer, PreparedScheduler, PreparedDataLoader)


class Accelerator(Checkpoints, Guards, BetweenRanks, HandsOutModel, _Upstream):  # type: ignore[misc,valid-type]  # accelerate is untyped
    """Accelerate's `Accelerator` for training with Megatron-Core.

    Takes the same arguments, and `faults`, a `FaultPolicy`. Without `megatron_lm_plugin` the
    plugin comes from the environment (`MEGATRON_LM_*`), as the launcher sets it. Every rank
    constructs it with the same settings; a rank with others is found here.

    Raises:
        ConfigurationError: The settings fit neither the number of ranks nor each other.
        UnsupportedError: An argument asks for something Megatron-Core is not used for here.
        RanksDisagreeError: The ranks have different settings.
        EngineError: Megatron-Core is missing, of an unknown version, or imported before.
    """

    def __init__(self, *args: Any, faults: FaultPolicy | None = None, **kwargs: Any) -> None:
        self._take_faults(faults)
        say_how_to_get_more_ranks()
        given = inspect.signature(_Upstream.__init__).bind(self, *args, **kwargs)
        arguments = {name: value for name, value in given.arguments.items() if name != "self"}
        given_plugin = arguments.pop("megatron_lm_plugin", None)
        with without_upstream_megatron(), rendezvous_advice():
            place = meeting_place(arguments.get("kwargs_handlers"))
            device_type = _device_of_all(arguments.get("cpu", False), place)
            arguments["cpu"] = device_type == "cpu"
            engine.activate(device_type)
            start_restarted_group(device_type, place)
            super().__init__(**_without_strategies(arguments))
        start_process_group(self.device)
        self._assembly: Assembly | None = None
        self._accumulation_steps = take_accumulation(self.gradient_state)

        def resolve(settings: dict[str, Any]) -> MegatronLMPlugin:
            refuse_other_strategies(arguments)
            check_precision(self.mixed_precision)
            plugin = as_plugin(given_plugin)
            settings |= settings_of(plugin, self.mixed_precision, None)
            settings |= {"faults": self.faults, **self._checkpoint_settings()}
            settings["gradient_accumulation_steps"] = self._accumulation_steps
            resolve_num_micro_batches(self._accumulation_steps, plugin.num_micro_batches)
            self._layout = resolve_layout(plugin, self.num_processes)
            return plugin

        enter_megatron_state(resolve_alike("construct", resolve))
        # Upstream has prepared autocast for bf16, which is not what bf16 means here.
        self.native_amp, self.scaler = False, None
        share_seed()

    # --- prepare -----------------------------------------------------------------------

    def prepare(
        self,
        *args: Any,
        device_placement: list[bool] | None = None,
        weights: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Return the objects, in the order given, as Megatron runs them.

        The model gets the weights it has now, sliced over the ranks. A model on the meta device
        (`accelerate.init_empty_weights`) gets those of the folder that its config came from,
        each rank reading its slices only; without one it is initialised. Every rank calls it
        with the same objects. Consumes no batch and draws no random number of the user's.

        Args:
            *args: The model, its optimizer (torch's AdamW, Adam or SGD), a
                `MegatronLMDummyScheduler`, DataLoaders (the first one is trained on), and a
                `MegatronLMDummyDataLoader`, three times for its three splits.
            device_placement: Refused: the engine places everything.
            weights: A Hugging Face folder whose weights the model gets instead.

        Raises:
            ConfigurationError: The model does not fit the layout, or the objects each other.
            UnsupportedError: An object of a kind that Megatron does not run.
            WeightsError: The weights are not those of the model's config.
            RanksDisagreeError: The ranks were given different objects.
        """
        fresh = [item for item in args if not isinstance(item, _PREPARED)]

        def resolve(settings: dict[str, Any]) -> ResolvedModel | None:
            settings |= settings_of(self._plugin, self.mixed_precision, None)
            if device_placement is not None:
                raise UnsupportedError(
                    "device_placement cannot be given: the engine places all parts itself."
                )
            self._plugin.check()
            if self._assembly is None:  # fields may have been set since the constructor
                self._layout = resolve_layout(self._plugin, self.num_processes)
            settings["objects given to prepare"] = [type(item).__name__ for item in args]
            resolved = self._resolve_parts(sort_objects(fresh), weights)
            settings |= settings_of(self._plugin, self.mixed_precision, resolved)
            return resolved

        resolved = resolve_alike("prepare", resolve)
        if resolved is not None:
            claim_checkpoint_folder(self)
            self._assembly = Assembly(self, resolved)
            self._start_guards(self._assembly.session)
            self._look_after_saves(self._assembly.session)
            self._models.append(self._assembly.model)
            self._publish_sizes()
        results = tuple(self._prepared(item) for item in args)
        return results if len(results) > 1 else results[0]

    @property
    def _plugin(self) -> MegatronLMPlugin:
        plugin: MegatronLMPlugin = self.state.megatron_lm_plugin
        return plugin

    def _resolve_parts(
        self, parts: Parts, weights: str | os.PathLike[str] | None
    ) -> ResolvedModel | None:
        if self._assembly is None:
            return resolve_model(
                parts,
                self._plugin,
                self._layout,
                self.mixed_precision,
                resolve_num_micro_batches(self._accumulation_steps, self._plugin.num_micro_batches),
                weights=weights,
                rank=self.process_index,
            )
        if weights is not None:
            raise ConfigurationError(
                "prepare got weights after the model; pass them in the call with the model."
            )
        for what in ("model", "optimizer", "scheduler"):
            if getattr(parts, what) is not None:
                raise ConfigurationError(
                    f"prepare got another {what}; Megatron trains one model with one optimizer "
                    "and one scheduler, all given to the first prepare call."
                )
        self._running.check_loaders(parts.loaders)
        return None

    def _publish_sizes(self) -> None:
        run = self._running.session.run
        shown = {
            name: value
            for name, value in vars(self._running.step_arguments).items()
            if not name.startswith("_")
        }
        self._plugin.megatron_lm_default_args = shown
        if run.micro_batch_size is not None:  # else reading them says what is missing
            self._plugin.micro_batch_size = run.micro_batch_size
            self._plugin.global_batch_size = run.global_batch_size
        self._plugin.data_parallel_size = run.layout.dp_size

    def _prepared(self, item: Any) -> Any:
        if isinstance(item, _PREPARED):
            return item
        if isinstance(item, torch.nn.Module):
            return self._prepared_of(item)
        if isinstance(item, torch.optim.Optimizer):
            self._optimizers.append(self._running.optimizer)
            return self._running.optimizer
        if isinstance(item, (torch.utils.data.DataLoader, MegatronLMDummyDataLoader)):
            loader: PreparedDataLoader
            if isinstance(item, MegatronLMDummyDataLoader):
                loader = self._running.indexed_loader(item, resolve_alike)
            else:
                loader = self._running.loader(item)
            self._guard_loader(loader)
            self._dataloaders.append(loader)
            return loader
        self._schedulers.append(self._running.scheduler)
        return self._running.scheduler

    @property
    def _running(self) -> Assembly:
        if self._assembly is None:
            raise TrainingLoopError("There is no prepared model yet; call accelerator.prepare.")
        return self._assembly

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Return the DataLoader as `prepare` does; the model must have been prepared."""
        return self.prepare(data_loader)

    def prepare_model(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: the model is built together with what it is trained with."""
        self._refuse_alone("prepare_model")

    def prepare_optimizer(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused, as `prepare_model`."""
        self._refuse_alone("prepare_optimizer")

    def prepare_scheduler(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused, as `prepare_model`."""
        self._refuse_alone("prepare_scheduler")

    def _refuse_alone(self, method: str) -> NoReturn:
        raise UnsupportedError(
            f"{method} cannot be used with Megatron-Core, which builds model, optimizer and "
            "scheduler together. Call prepare(model, optimizer, loader, scheduler)."
        )

    # --- the training loop -------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Check that `loss` is what the model returned; its backward pass is already done.

        Raises:
            TrainingLoopError: It is another tensor, whose gradient would be lost, or comes from
                a forward pass alone, which made no gradient.
        """
        if loss is not self._running.model.last_loss:
            raise TrainingLoopError(
                "accelerator.backward got a tensor that is not the loss the model just returned "
                "(scaled, or summed with another term?). The gradients were computed inside "
                "model(**batch), so this one would have no effect. Change the loss with "
                "MegatronLMPlugin(custom_loss_function=...); pass outputs.loss here."
            )
        if not self._running.model.last_was_update:
            raise TrainingLoopError(
                "accelerator.backward got the loss of a forward pass alone: the model was in eval "
                "mode, or called under torch.no_grad(), so nothing was updated. Call model.train() "
                "before the training step."
            )

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Return the global L2 norm of the last update's gradients, before clipping.

        NaN when that update was left out (`optimizer_step_was_skipped`): it has none.
        The clipping itself is done with the update, to the plugin's `gradient_clipping`.

        Raises:
            TrainingLoopError: Another limit, norm or set of parameters is asked for, or there
                was no update yet.
        """
        session = self._running.session
        clipping = session.run.gradient_clipping
        # No limit can be written as 0, the plugin's way, and as infinity, torch's.
        limits = (clipping,) if clipping else (0.0, float("inf"))
        if float(max_norm) not in limits or float(norm_type) != 2.0:
            raise TrainingLoopError(
                f"clip_grad_norm_ was called with max_norm={max_norm} and norm_type={norm_type}, "
                f"but the update has been made with the plugin's gradient_clipping={clipping} and "
                f"the L2 norm. Set MegatronLMPlugin(gradient_clipping={max_norm})."
            )
        if {id(p) for p in parameters} != {id(p) for p in self._running.model.parameters()}:
            raise TrainingLoopError(
                "clip_grad_norm_ got other parameters than the prepared model's; the norm is over "
                "all of them. Pass model.parameters()."
            )
        if session.grad_norm is None and not session.step_was_skipped:
            raise TrainingLoopError("clip_grad_norm_ came before any update; call the model first.")
        norm = math.nan if session.grad_norm is None else session.grad_norm
        return torch.tensor(norm, device=self.device)

    def clip_grad_value_(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: Megatron clips by the global norm."""
        raise UnsupportedError(
            "clip_grad_value_ cannot be used with Megatron-Core, which clips by the global norm "
            "inside the update. Set MegatronLMPlugin(gradient_clipping=...)."
        )

    def no_sync(self, _model: torch.nn.Module) -> NoReturn:
        """Refused: each call of the model is an update."""
        raise UnsupportedError(
            "no_sync cannot be used with Megatron-Core: each model(**batch) is one update. Set "
            "MegatronLMPlugin(num_micro_batches=...) to accumulate gradients."
        )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was left out because of a gradient that is not finite."""
        return self._running.session.step_was_skipped

    # --- the end ------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop the prepared model and all that belongs to it; another one can be prepared.

        Args:
            *objects: Variables of the script; returned as None, for it to drop them too.
        """
        self._forget_saves()
        self._close_log()
        self._assembly = None
        released: list[Any] = super().free_memory(*objects)
        return released

    def end_training(self) -> None:
        """Wait for a save in the background; close the plugin's event files and all trackers."""
        self.wait_for_save()
        self._close_log()
        super().end_training()

    def _close_log(self) -> None:
        if self._assembly is not None and self._assembly.log is not None:
            self._assembly.log.close()


def _device_of_all(cpu: bool, place: MeetingPlace | None) -> Literal["cpu", "cuda"]:
    """Return what all ranks compute on; ranks with another backend than the rest would hang.

    Raises:
        RanksDisagreeError: Some have found CUDA, some not, or were told so; names them.
        ConfigurationError: `ACCELERATE_USE_CPU` is no boolean word.
    """
    error: ConfigurationError | None = None
    device_type: Literal["cpu", "cuda"] = "cuda"
    try:
        device_type = "cpu" if wants_cpu(cpu) else "cuda"
    except ConfigurationError as caught:
        error = caught
    if place is not None:
        agree(
            {} if error else {"device (cpu where CUDA finds no GPU)": device_type},
            error,
            store=place.store,
            rank=place.rank,
            world_size=place.world_size,
            name="device",
            timeout=place.timeout.total_seconds(),
        )
    elif error is not None:
        raise error
    return device_type


def _without_strategies(arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop what `refuse_other_strategies` will refuse, so that all ranks get to refuse it."""
    return {name: value for name, value in arguments.items() if name not in OTHER_STRATEGIES}
