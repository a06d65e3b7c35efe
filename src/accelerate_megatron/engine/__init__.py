"""The engine: everything that touches Megatron-Core. No other part of the package imports it.

Importing this package imports neither Megatron-Core nor its own modules. `activate` prepares
the import of Megatron-Core for a device; the names below are imported when first used, which
activates the engine for the machine's device if nobody did before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accelerate_megatron.engine.activation import (
    activate,
    active_device,
    default_device,
    has_transformer_engine,
)

if TYPE_CHECKING:
    from accelerate_megatron.engine.balancing import LoadBalance
    from accelerate_megatron.engine.build import (
        build_chunks,
        freeze,
        model_shards,
        parameter_norm,
        prepared_chunks,
        wrap_chunks,
    )
    from accelerate_megatron.engine.checkpointing import (
        TensorPieces,
        lasting_pieces,
        pieces_to_load,
        pieces_to_save,
        read_pieces,
        write_pieces,
    )
    from accelerate_megatron.engine.context_parallel import gather_sequence, take_slice
    from accelerate_megatron.engine.datasets import build_gpt_datasets, sequence_numbers
    from accelerate_megatron.engine.decoding import Decoder, can_decode
    from accelerate_megatron.engine.encoder_outputs import encoder_outputs
    from accelerate_megatron.engine.experts import balance_routers, hide_padding
    from accelerate_megatron.engine.groups import (
        Ranks,
        data_parallel_group,
        mean_over_data_parallel,
        start_groups,
    )
    from accelerate_megatron.engine.logits import LogitsRecorder, model_logits
    from accelerate_megatron.engine.main_copies import main_copy_shards
    from accelerate_megatron.engine.masked_datasets import build_masked_datasets
    from accelerate_megatron.engine.optimizer import build_optimizer, build_scheduler, step_if
    from accelerate_megatron.engine.optimizer_state import optimizer_numbers, set_optimizer_numbers
    from accelerate_megatron.engine.randomness import ModelRandomness
    from accelerate_megatron.engine.schedule import clear_gradients, run_schedule, scale_gradients
    from accelerate_megatron.engine.shards import Shard
    from accelerate_megatron.engine.two_stack_decoding import TwoStackDecoder

__all__ = [
    "Decoder",
    "LoadBalance",
    "LogitsRecorder",
    "ModelRandomness",
    "Ranks",
    "Shard",
    "TensorPieces",
    "TwoStackDecoder",
    "activate",
    "active_device",
    "balance_routers",
    "build_chunks",
    "build_gpt_datasets",
    "build_masked_datasets",
    "build_optimizer",
    "build_scheduler",
    "can_decode",
    "clear_gradients",
    "data_parallel_group",
    "encoder_outputs",
    "freeze",
    "gather_sequence",
    "has_transformer_engine",
    "hide_padding",
    "lasting_pieces",
    "main_copy_shards",
    "mean_over_data_parallel",
    "model_logits",
    "model_shards",
    "optimizer_numbers",
    "parameter_norm",
    "pieces_to_load",
    "pieces_to_save",
    "prepared_chunks",
    "read_pieces",
    "run_schedule",
    "scale_gradients",
    "sequence_numbers",
    "set_optimizer_numbers",
    "start_groups",
    "step_if",
    "take_slice",
    "wrap_chunks",
    "write_pieces",
]

_EXPORTS: dict[str, str] = {
    "Decoder": "decoding",
    "LogitsRecorder": "logits",
    "can_decode": "decoding",
    "LoadBalance": "balancing",
    "balance_routers": "experts",
    "hide_padding": "experts",
    "ModelRandomness": "randomness",
    "Ranks": "groups",
    "Shard": "shards",
    "TensorPieces": "checkpointing",
    "TwoStackDecoder": "two_stack_decoding",
    "build_chunks": "build",
    "build_gpt_datasets": "datasets",
    "build_masked_datasets": "masked_datasets",
    "build_optimizer": "optimizer",
    "build_scheduler": "optimizer",
    "clear_gradients": "schedule",
    "data_parallel_group": "groups",
    "encoder_outputs": "encoder_outputs",
    "freeze": "build",
    "gather_sequence": "context_parallel",
    "mean_over_data_parallel": "groups",
    "main_copy_shards": "main_copies",
    "model_logits": "logits",
    "model_shards": "build",
    "parameter_norm": "build",
    "optimizer_numbers": "optimizer_state",
    "prepared_chunks": "build",
    "lasting_pieces": "checkpointing",
    "pieces_to_load": "checkpointing",
    "pieces_to_save": "checkpointing",
    "read_pieces": "checkpointing",
    "run_schedule": "schedule",
    "scale_gradients": "schedule",
    "sequence_numbers": "datasets",
    "set_optimizer_numbers": "optimizer_state",
    "start_groups": "groups",
    "step_if": "optimizer",
    "take_slice": "context_parallel",
    "wrap_chunks": "build",
    "write_pieces": "checkpointing",
}
"""Public name -> the module of this package that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if active_device() is None:
        activate(default_device())
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
