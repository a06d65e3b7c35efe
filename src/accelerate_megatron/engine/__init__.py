"""The engine: everything that touches Megatron-Core. No other part of the package imports it.

Importing this package imports neither Megatron-Core nor its own modules. `activate` prepares
the import of Megatron-Core for a device; the names below are imported when first used, which
activates the engine for the machine's device if nobody did before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accelerate_megatron.engine.activation import activate as activate
from accelerate_megatron.engine.activation import active_device as active_device
from accelerate_megatron.engine.activation import default_device
from accelerate_megatron.engine.activation import has_transformer_engine as has_transformer_engine

if TYPE_CHECKING:
    from accelerate_megatron.engine.balancing import LoadBalance as LoadBalance
    from accelerate_megatron.engine.build import build_chunks as build_chunks
    from accelerate_megatron.engine.build import freeze as freeze
    from accelerate_megatron.engine.build import model_shards as model_shards
    from accelerate_megatron.engine.build import parameter_norm as parameter_norm
    from accelerate_megatron.engine.build import prepared_chunks as prepared_chunks
    from accelerate_megatron.engine.build import wrap_chunks as wrap_chunks
    from accelerate_megatron.engine.checkpointing import TensorPieces as TensorPieces
    from accelerate_megatron.engine.checkpointing import lasting_pieces as lasting_pieces
    from accelerate_megatron.engine.checkpointing import pieces_to_load as pieces_to_load
    from accelerate_megatron.engine.checkpointing import pieces_to_save as pieces_to_save
    from accelerate_megatron.engine.checkpointing import read_pieces as read_pieces
    from accelerate_megatron.engine.checkpointing import write_pieces as write_pieces
    from accelerate_megatron.engine.context_parallel import gather_sequence as gather_sequence
    from accelerate_megatron.engine.context_parallel import take_slice as take_slice
    from accelerate_megatron.engine.datasets import build_gpt_datasets as build_gpt_datasets
    from accelerate_megatron.engine.datasets import sequence_numbers as sequence_numbers
    from accelerate_megatron.engine.decoding import Decoder as Decoder
    from accelerate_megatron.engine.decoding import can_decode as can_decode
    from accelerate_megatron.engine.encoder_outputs import encoder_outputs as encoder_outputs
    from accelerate_megatron.engine.experts import balance_routers as balance_routers
    from accelerate_megatron.engine.experts import hide_padding as hide_padding
    from accelerate_megatron.engine.groups import Ranks as Ranks
    from accelerate_megatron.engine.groups import data_parallel_group as data_parallel_group
    from accelerate_megatron.engine.groups import mean_over_data_parallel as mean_over_data_parallel
    from accelerate_megatron.engine.groups import start_groups as start_groups
    from accelerate_megatron.engine.logits import LogitsRecorder as LogitsRecorder
    from accelerate_megatron.engine.logits import model_logits as model_logits
    from accelerate_megatron.engine.main_copies import main_copy_shards as main_copy_shards
    from accelerate_megatron.engine.masked_datasets import (
        build_masked_datasets as build_masked_datasets,
    )
    from accelerate_megatron.engine.optimizer import build_optimizer as build_optimizer
    from accelerate_megatron.engine.optimizer import build_scheduler as build_scheduler
    from accelerate_megatron.engine.optimizer import step_if as step_if
    from accelerate_megatron.engine.optimizer_state import optimizer_numbers as optimizer_numbers
    from accelerate_megatron.engine.optimizer_state import (
        set_optimizer_numbers as set_optimizer_numbers,
    )
    from accelerate_megatron.engine.randomness import ModelRandomness as ModelRandomness
    from accelerate_megatron.engine.schedule import clear_gradients as clear_gradients
    from accelerate_megatron.engine.schedule import run_schedule as run_schedule
    from accelerate_megatron.engine.schedule import scale_gradients as scale_gradients
    from accelerate_megatron.engine.shards import Shard as Shard
    from accelerate_megatron.engine.two_stack_decoding import TwoStackDecoder as TwoStackDecoder

_EXPORTS: dict[str, str] = {
    "Decoder": "decoding",
    "LoadBalance": "balancing",
    "LogitsRecorder": "logits",
    "ModelRandomness": "randomness",
    "Ranks": "groups",
    "Shard": "shards",
    "TensorPieces": "checkpointing",
    "TwoStackDecoder": "two_stack_decoding",
    "balance_routers": "experts",
    "build_chunks": "build",
    "build_gpt_datasets": "datasets",
    "build_masked_datasets": "masked_datasets",
    "build_optimizer": "optimizer",
    "build_scheduler": "optimizer",
    "can_decode": "decoding",
    "clear_gradients": "schedule",
    "data_parallel_group": "groups",
    "encoder_outputs": "encoder_outputs",
    "freeze": "build",
    "gather_sequence": "context_parallel",
    "hide_padding": "experts",
    "lasting_pieces": "checkpointing",
    "main_copy_shards": "main_copies",
    "mean_over_data_parallel": "groups",
    "model_logits": "logits",
    "model_shards": "build",
    "optimizer_numbers": "optimizer_state",
    "parameter_norm": "build",
    "pieces_to_load": "checkpointing",
    "pieces_to_save": "checkpointing",
    "prepared_chunks": "build",
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
