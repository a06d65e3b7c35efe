"""A resolved run under Megatron's names: where each value stands, said once. No torch here.

The names here are both fields of Megatron-Core's configuration objects, which `engine/translate`
fills, and arguments of its command line, which `view` shows to train steps. Arguments that
can be given are in `argument_table`, with the field of the run that they set: their values are read
from there. What only one of the two sides knows is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate_megatron.config.argument_table import ARGUMENTS
from accelerate_megatron.config.run import RunConfig

Value = Callable[[RunConfig], Any]

ARCHITECTURE: dict[str, Value] = {
    "num_layers": lambda run: run.shape.num_layers,
    "hidden_size": lambda run: run.shape.hidden_size,
    "ffn_hidden_size": lambda run: run.shape.ffn_hidden_size,
    "num_attention_heads": lambda run: run.shape.num_attention_heads,
    "num_query_groups": lambda run: run.shape.num_query_groups,
    "kv_channels": lambda run: run.shape.kv_channels,
    "normalization": lambda run: run.shape.normalization,
    "layernorm_epsilon": lambda run: run.shape.norm_epsilon,
    "add_bias_linear": lambda run: run.shape.linear_bias,
    "add_qkv_bias": lambda run: run.shape.qkv_bias,
    "qk_layernorm": lambda run: run.shape.qk_norm,
    "softmax_scale": lambda run: run.shape.softmax_scale,
    "hidden_dropout": lambda run: run.shape.hidden_dropout,
    "attention_dropout": lambda run: run.shape.attention_dropout,
}

PARALLELISM: dict[str, Value] = {
    "tensor_model_parallel_size": lambda run: run.layout.tp_size,
    "pipeline_model_parallel_size": lambda run: run.layout.pp_size,
    "virtual_pipeline_model_parallel_size": lambda run: run.layout.chunks_per_stage(
        run.shape.num_layers
    ),
    "context_parallel_size": lambda run: run.layout.cp_size,
    "cp_comm_type": lambda run: run.layout.cp_comm_type,
    "sequence_parallel": lambda run: run.layout.sequence_parallel,
}

PRECISION: dict[str, Value] = {
    "bf16": lambda run: run.precision == "bf16",
    "fp16": lambda run: run.precision == "fp16",
}

EXPERTS: dict[str, Value] = {
    "moe_router_topk": lambda run: run.shape.experts and run.shape.experts.top_k,
    "moe_ffn_hidden_size": lambda run: run.shape.experts and run.shape.experts.ffn_hidden_size,
}
"""None without experts."""

GRADIENTS: dict[str, Value] = {
    "use_distributed_optimizer": lambda run: run.use_distributed_optimizer,
    "overlap_grad_reduce": lambda run: run.overlap_grad_reduce,
    "overlap_param_gather": lambda run: run.overlap_param_gather,
}

RECOMPUTE: dict[str, Value] = {
    "recompute_granularity": lambda run: run.recompute and run.recompute.granularity,
    "recompute_method": lambda run: run.recompute and run.recompute.method,
    "recompute_num_layers": lambda run: run.recompute and run.recompute.num_layers,
}
"""None without recomputation."""

LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Arguments that the optimizer's configuration has under the same names."""

DISPATCH = (
    "moe_token_dispatcher_type",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
)
"""Arguments that the model's configuration has under the same names, in a model with experts."""


def values_of(table: Mapping[str, Value], run: RunConfig) -> dict[str, Any]:
    """Return the values of one of the tables above."""
    return {name: value(run) for name, value in table.items()}


def given_values(run: RunConfig) -> dict[str, Any]:
    """Return the arguments that set one field of the run, with what stands there.

    Those of experts only for a model that has some.
    """
    homes = {
        "run": run,
        "layout": run.layout,
        "shape": run.shape,
        "experts": run.experts,
        "scaling": run.loss_scaling,
        "recompute": run.recompute,
    }
    values: dict[str, Any] = {}
    for name, argument in ARGUMENTS.items():
        if argument.home not in homes or (argument.needs == "experts" and not run.shape.experts):
            continue
        home = homes[argument.home]
        if home is None:  # recomputation is off
            values[name] = None
        elif hasattr(home, argument.field):  # else a part of a field, which the view shows
            value = getattr(home, argument.field)
            values[name] = list(value) if isinstance(value, tuple) else value
    return values
