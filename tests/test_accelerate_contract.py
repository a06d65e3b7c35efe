"""What `Accelerator` overrides still looks upstream as it did when it was overridden."""

from __future__ import annotations

import inspect

import accelerate
import pytest
from accelerate.state import AcceleratorState, PartialState

from accelerate_megatron import Accelerator

SIGNATURES = {
    "prepare": "(self, *args, device_placement=None)",
    "prepare_data_loader": (
        "(self, data_loader: 'torch.utils.data.DataLoader', device_placement=None, "
        "slice_fn_for_dispatch=None)"
    ),
    "prepare_model": (
        "(self, model: 'torch.nn.Module', device_placement: 'bool | None' = None, "
        "evaluation_mode: 'bool' = False)"
    ),
    "prepare_optimizer": "(self, optimizer: 'torch.optim.Optimizer', device_placement=None)",
    "prepare_scheduler": "(self, scheduler: 'LRScheduler')",
    "backward": "(self, loss, **kwargs)",
    "clip_grad_norm_": "(self, parameters, max_norm, norm_type=2)",
    "clip_grad_value_": "(self, parameters, clip_value)",
    "wait_for_everyone": "(self)",
    "main_process_first": "(self)",
    "local_main_process_first": "(self)",
    "print": "(self, *args, **kwargs)",
    "gather": "(self, tensor)",
    "gather_for_metrics": "(self, input_data, use_gather_object=False)",
    "pad_across_processes": "(self, tensor, dim=0, pad_index=0, pad_first=False)",
    "reduce": "(self, tensor, reduction='sum', scale=1.0)",
    "check_trigger": "(self)",
    "no_sync": "(self, model)",
    "free_memory": "(self, *objects)",
    "end_training": "(self)",
    "unwrap_model": (
        "(self, model, keep_fp32_wrapper: 'bool' = True, keep_torch_compile: 'bool' = True)"
    ),
    "get_state_dict": "(self, model, unwrap=True)",
    "save_model": (
        "(self, model: 'torch.nn.Module', save_directory: 'Union[str, os.PathLike]', "
        "max_shard_size: 'Union[int, str]' = '10GB', safe_serialization: 'bool' = True)"
    ),
    "save_state": (
        "(self, output_dir: 'str | None' = None, safe_serialization: 'bool' = True, "
        "**save_model_func_kwargs)"
    ),
    "skip_first_batches": "(self, dataloader, num_batches: 'int' = 0)",
    "load_state": (
        "(self, input_dir: 'str | None' = None, load_kwargs: 'dict | None' = None, "
        "**load_model_func_kwargs)"
    ),
}
"""Signatures of accelerate 1.15."""

PROPERTIES = ("is_local_main_process", "optimizer_step_was_skipped")


@pytest.mark.parametrize("name", SIGNATURES)
def test_upstream_signature_is_the_one_that_was_overridden(name: str) -> None:
    assert str(inspect.signature(getattr(accelerate.Accelerator, name))) == SIGNATURES[name]


def test_the_list_above_is_all_that_is_overridden() -> None:
    inherited = vars(accelerate.Accelerator)
    ours = [kind for kind in Accelerator.__mro__ if kind.__module__.startswith("accelerate_meg")]
    overridden = {
        name
        for kind in ours
        for name in vars(kind)
        if name in inherited and not name.startswith("__")
    }

    assert overridden == {*SIGNATURES, *PROPERTIES}


def test_the_shared_states_that_we_write_to_are_still_there() -> None:
    for state in (PartialState, AcceleratorState):
        assert isinstance(state._shared_state, dict)
        assert "distributed_type" in state._known_attrs


def test_upstream_constructor_takes_what_ours_passes_on() -> None:
    parameters = inspect.signature(accelerate.Accelerator.__init__).parameters

    assert {
        "mixed_precision",
        "gradient_accumulation_steps",
        "cpu",
        "megatron_lm_plugin",
        "deepspeed_plugin",
        "fsdp_plugin",
        "parallelism_config",
        "dynamo_backend",
        "log_with",
        "project_dir",
        "kwargs_handlers",
    } <= set(parameters)
