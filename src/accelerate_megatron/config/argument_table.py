"""Megatron's arguments by name: where each one goes, or why it goes nowhere. No torch here.

What a name stands for in a run is decided by `arguments.py`; this file only holds the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Home = Literal[
    "transformer",
    "optimizer",
    "ddp",
    "shape",
    "run",
    "layout",
    "experts",
    "scaling",
    "recompute",
    "schedule",
    "logging",
    "plugin",
    "fixed",
    "steps",
]
"""Where an argument's value goes.

"transformer", "optimizer" and "ddp" are fields of Megatron-Core's own configuration objects, set
last. "shape" to "logging" are fields of this package's values. "plugin" is a field of
`MegatronLMPlugin`. "fixed" follows from the script's objects, and may be repeated but not changed.
"steps" is shown to train steps, and changes nothing else.
"""

Kind = Literal["int", "float", "bool", "str", "strs", "dtype"]


@dataclass(frozen=True)
class Argument:
    """One argument that is accepted.

    Attributes:
        home: Where its value goes.
        field: Its name there.
        kind: What a value has to be.
        choices: The words that are allowed, if only some are.
        least: The smallest number that is allowed, if any is not.
        needs: What has to be on for it to have an effect; a key of `arguments.NEEDS`.
    """

    home: Home
    field: str
    kind: Kind
    choices: tuple[str, ...] = ()
    least: int | None = None
    needs: str = ""


def _same(home: Home, kind: Kind, *names: str, needs: str = "") -> dict[str, Argument]:
    """Return arguments whose names are also those of their fields."""
    return {name: Argument(home, name, kind, needs=needs) for name in names}


_TRANSFORMER = {
    **_same("transformer", "bool", "distribute_saved_activations", needs="full recomputation"),
    **_same("transformer", "int", "microbatch_group_size_per_vp_stage", needs="virtual stages"),
    **_same("transformer", "bool", "overlap_p2p_comm_warmup_flush", needs="plain virtual stages"),
}

_OPTIMIZER = {
    **_same(
        "optimizer",
        "dtype",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        needs="use_precision_aware_optimizer",
    ),
    **_same("optimizer", "bool", "store_param_remainders", needs="use_precision_aware_optimizer"),
    **_same("optimizer", "float", "optimizer_offload_fraction", needs="optimizer_cpu_offload"),
    **_same(
        "optimizer",
        "bool",
        "use_torch_optimizer_for_cpu_offload",
        "pin_cpu_grads",
        "pin_cpu_params",
        needs="optimizer_cpu_offload",
    ),
    "initial_loss_scale": Argument("scaling", "initial", "float", needs="fp16"),
    "min_loss_scale": Argument("scaling", "smallest", "float", needs="fp16"),
    "loss_scale_window": Argument("scaling", "growth_interval", "int", needs="fp16"),
    "hysteresis": Argument("scaling", "hysteresis", "int", needs="fp16"),
    "loss_scale": Argument("optimizer", "loss_scale", "float", needs="fp16"),
}

_DDP = {
    **_same("run", "bool", "overlap_grad_reduce"),
    "overlap_param_gather": Argument(
        "run", "overlap_param_gather", "bool", needs="overlapped reduction"
    ),
    "align_param_gather": Argument("ddp", "align_param_gather", "bool", needs="overlapped gather"),
    "ddp_bucket_size": Argument("ddp", "bucket_size", "int", needs="overlap_grad_reduce"),
    "bucket_size": Argument("ddp", "bucket_size", "int", needs="overlap_grad_reduce"),
    "ddp_pad_buckets_for_high_nccl_busbw": Argument(
        "ddp", "pad_buckets_for_high_nccl_busbw", "bool", needs="use_distributed_optimizer"
    ),
    "ddp_average_in_collective": Argument(
        "ddp", "average_in_collective", "bool", needs="a mean of micro-batches"
    ),
    "average_in_collective": Argument(
        "ddp", "average_in_collective", "bool", needs="a mean of micro-batches"
    ),
    "grad_reduce_in_fp32": Argument("ddp", "grad_reduce_in_fp32", "bool"),
    "accumulate_allreduce_grads_in_fp32": Argument("ddp", "grad_reduce_in_fp32", "bool"),
    "check_for_nan_in_loss_and_grad": Argument("ddp", "check_for_nan_in_grad", "bool"),
    "pad_buckets_for_high_nccl_busbw": Argument(
        "ddp", "pad_buckets_for_high_nccl_busbw", "bool", needs="use_distributed_optimizer"
    ),
    **_same("ddp", "bool", "check_for_nan_in_grad", "check_for_large_grads"),
}

_POSITIONS = ("learned_absolute", "absolute", "rope", "rotary", "alibi")

_SHAPE = {
    "layernorm_epsilon": Argument("shape", "norm_epsilon", "float"),
    "norm_epsilon": Argument("shape", "norm_epsilon", "float"),
    "init_method_std": Argument("shape", "initializer_range", "float"),
    "softmax_scale": Argument("shape", "softmax_scale", "float"),
    "rotary_base": Argument("shape", "rope_theta", "float", needs="rotary positions"),
    "rotary_percent": Argument("shape", "rotary_percent", "float", needs="rotary positions"),
    "position_embedding_type": Argument("shape", "position_embedding", "str", _POSITIONS),
    "attention_head_type": Argument(
        "shape", "attention_head_type", "str", ("multihead", "multiquery")
    ),
    "openai_gelu": Argument("shape", "gelu_tanh", "bool"),
    "moe_aux_loss_coeff": Argument("shape", "balance_coefficient", "float", needs="experts"),
    "moe_router_topk_scaling_factor": Argument("shape", "scaling_factor", "float", needs="experts"),
}

_EXPERTS = {
    "moe_token_dispatcher_type": Argument(
        "experts", "dispatcher", "str", ("alltoall", "allgather"), needs="experts"
    ),
    "moe_grouped_gemm": Argument("experts", "grouped", "bool", needs="experts"),
    "moe_expert_capacity_factor": Argument("experts", "capacity_factor", "float", needs="experts"),
    "moe_pad_expert_input_to_capacity": Argument(
        "experts", "pad_to_capacity", "bool", needs="experts"
    ),
    "moe_token_drop_policy": Argument(
        "experts", "drop_policy", "str", ("probs", "position"), needs="experts"
    ),
    "moe_z_loss_coeff": Argument("experts", "z_loss_coefficient", "float", needs="experts"),
    "moe_router_load_balancing_type": Argument(
        "experts", "load_balancing", "str", ("aux_loss", "seq_aux_loss"), needs="experts"
    ),
    "moe_router_bias_update_rate": Argument(
        "experts", "bias_update_rate", "float", needs="experts"
    ),
}

_RUN = {
    **_same("run", "int", "seed"),
    **_same("run", "bool", "async_save"),
    "make_vocab_size_divisible_by": Argument("run", "vocab_multiple", "int", least=1),
    "cp_comm_type": Argument("layout", "cp_comm_type", "str", needs="context parallelism"),
    "recompute_modules": Argument(
        "recompute",
        "modules",
        "strs",
        ("core_attn", "layernorm", "mlp", "moe", "shared_experts"),
        needs="selective recomputation",
    ),
}

_WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")

_SCHEDULE = {
    "lr_warmup_init": Argument("schedule", "init_lr", "float", needs="a schedule"),
    "lr_wsd_decay_style": Argument("schedule", "wsd_decay_style", "str", _WSD_STYLES, needs="WSD"),
    "lr_wsd_decay_iters": Argument("schedule", "wsd_decay_iters", "int", needs="WSD"),
    "lr_wsd_decay_samples": Argument("schedule", "wsd_decay_samples", "int", needs="WSD"),
}

_LOGGED = {
    "log_params_norm": "params_norm",
    "log_num_zeros_in_grad": "num_zeros",
    "log_memory_to_tensorboard": "memory",
    "log_throughput": "throughput",
    "log_validation_ppl_to_tensorboard": "validation",
    "log_learning_rate_to_tensorboard": "learning_rate",
    "log_loss_scale_to_tensorboard": "loss_scale",
    "log_batch_size_to_tensorboard": "batch_size",
    "log_world_size_to_tensorboard": "world_size",
    "log_timers_to_tensorboard": "timers",
}

_LOGGING = {
    # One log is written: both say how often.
    "tensorboard_log_interval": Argument("logging", "interval", "int", least=1, needs="a log"),
    "log_interval": Argument("logging", "interval", "int", least=1, needs="a log"),
    **{
        name: Argument("logging", switch, "bool", needs="a log") for name, switch in _LOGGED.items()
    },
}

PLUGIN_FIELDS = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
    "decoder_last_pipeline_num_layers": "decoder_last_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""Megatron's argument -> the plugin's field, where the two have different names.

Every field of the plugin whose value is a word or number is also an argument of its own name.
"""

_FIXED = {
    **_same(
        "fixed",
        "int",
        "micro_batch_size",
        "global_batch_size",
        "num_layers",
        "encoder_num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "max_position_embeddings",
        "vocab_size",
        "padded_vocab_size",
        "world_size",
        "data_parallel_size",
        "num_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
    ),
    **_same(
        "fixed",
        "bool",
        "group_query_attention",
        "swiglu",
        "untie_embeddings_and_output_weights",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "add_position_embedding",
        "bf16",
        "fp16",
        "use_cpu_initialization",
    ),
    **_same("fixed", "str", "normalization", "model_type_name", "transformer_impl"),
}

_STEPS = {
    **_same(
        "steps",
        "str",
        "tokenizer_type",
        "tokenizer_model",
        "tokenizer_name_or_path",
        "vocab_file",
        "merge_file",
    ),
    **_same("steps", "int", "vocab_extra_ids", "eos_token_id", "pad_token_id", "bos_token_id"),
}

ARGUMENTS: dict[str, Argument] = {
    **_TRANSFORMER,
    **_OPTIMIZER,
    **_DDP,
    **_SHAPE,
    **_EXPERTS,
    **_RUN,
    **_SCHEDULE,
    **_LOGGING,
    **_FIXED,
    **_STEPS,
}
"""The arguments that are accepted, except those of the plugin's own names."""
