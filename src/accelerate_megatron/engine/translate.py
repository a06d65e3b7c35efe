"""The resolved run in Megatron's own configuration objects.

Nothing is decided here but what depends on the device and on the chunks: how stages exchange.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig

from accelerate_megatron.config.megatron_names import (
    ARCHITECTURE,
    GRADIENTS,
    LOSS_SCALING,
    PARALLELISM,
    PRECISION,
    RECOMPUTE,
    given_values,
    values_of,
)
from accelerate_megatron.config.run import OptimizerSettings, RunConfig
from accelerate_megatron.engine.activation import active_device
from accelerate_megatron.engine.experts import expert_config
from accelerate_megatron.engine.model_config import ModelConfig
from accelerate_megatron.models.shape import ModelShape

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
NAMED_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}
"""Megatron's words for the optimizer's dtypes; its fp8 is uint8 (Transformer Engine's storage)."""
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def transformer_config(run: RunConfig) -> ModelConfig:
    """Return Megatron's model configuration for `run`."""
    with warnings.catch_warnings():
        # Said of every recomputed core attention, though only Transformer Engine's is meant.
        warnings.filterwarnings("ignore", "If you are using transformer_engine", UserWarning)
        # Said of Megatron's own default (megatron-core 0.16.1).
        warnings.filterwarnings("ignore", "full scope is deprecated", UserWarning)
        return ModelConfig(**{**_model_settings(run), **_named(run.engine.transformer)})


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with Megatron's words for dtypes as torch's dtypes."""
    return {
        name: NAMED_DTYPES[value] if name.endswith("_dtype") else value
        for name, value in settings.items()
    }


def _model_settings(run: RunConfig) -> dict[str, Any]:
    layout, dtype = run.layout, DTYPES[run.precision]
    chunks = layout.chunks_per_stage(run.shape.num_layers)
    return dict(
        **values_of(ARCHITECTURE, run),
        **_own_architecture(run.shape),
        **expert_config(run),
        **values_of(PARALLELISM, run),
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **values_of(PRECISION, run),
        **_recompute(run),
        attention_kernel=run.attention.kernel,
        attention_softmax_in_fp32=run.attention.softmax_in_fp32,
        calculate_per_token_loss=run.per_token_loss,
        finalize_model_grads_func=finalize_model_grads,
        # Importing writes every weight, so none is initialised first. Not by
        # perform_initialization=False: the marks that tell Megatron which parameters are
        # split over tensor-parallel ranks are set during initialisation, and without them
        # the gradient norm leaves their other parts out (megatron-core 0.16.1).
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        # With two stages, previous and next are one peer, and Megatron's batched messages
        # pair up crosswise: silently wrong gradients (megatron-core 0.16.1).
        overlap_p2p_comm=chunks is not None,
        batch_p2p_comm=chunks is None,
        # gloo sends from the tensor's memory after the call has returned, so an output whose
        # message is not waited for must not be freed: silently wrong losses.
        deallocate_pipeline_outputs=chunks is None or active_device() == "cuda",
        # These need Apex or Transformer Engine, or a compiler.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _own_architecture(shape: ModelShape) -> dict[str, Any]:
    """Return what Megatron-Core's configuration alone has, or has in another form."""
    return {
        "activation_func": ACTIVATIONS[shape.activation],
        "gated_linear_unit": shape.gated_mlp,
        "attention_output_bias": shape.attention_output_bias,
        "attention_windows": shape.attention_windows,
        "latent": shape.latent,
        "apply_query_key_layer_scaling": shape.scale_attention_by_layer,
        "mlp_dropout": shape.mlp_dropout,
    }


def _recompute(run: RunConfig) -> dict[str, Any]:
    if run.recompute is None:
        return {}
    return {**values_of(RECOMPUTE, run), "recompute_modules": list(run.recompute.modules)}


def ddp_config(run: RunConfig) -> DistributedDataParallelConfig:
    """Return the settings of Megatron's DistributedDataParallel for `run`."""
    settings: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        **values_of(GRADIENTS, run),
    }
    return DistributedDataParallelConfig(**{**settings, **_named(run.engine.ddp)})


def optimizer_config(run: RunConfig, optimizer: OptimizerSettings) -> OptimizerConfig:
    """Return Megatron's optimizer configuration; each parameter group overrides its own part."""
    first, given = optimizer.groups[0], given_values(run)
    settings: dict[str, Any] = {
        "optimizer": optimizer.kind,
        "lr": first.lr,
        "min_lr": run.schedule.min_lr if run.schedule else 0.0,
        "weight_decay": first.weight_decay,
        # Megatron asserts it for every offloaded optimizer; it has no effect on SGD.
        "decoupled_weight_decay": optimizer.decoupled_weight_decay or optimizer.kind == "sgd",
        "params_dtype": DTYPES[run.precision],
        **values_of(PRECISION, run),
        **{name: given[name] for name in LOSS_SCALING},
        "use_distributed_optimizer": run.use_distributed_optimizer,
        "overlap_param_gather": run.overlap_param_gather,
        "optimizer_cpu_offload": run.optimizer_cpu_offload,
        "optimizer_offload_fraction": 1.0 if run.optimizer_cpu_offload else 0.0,
        "overlap_cpu_optimizer_d2h_h2d": run.overlap_cpu_optimizer_d2h_h2d,
        "use_precision_aware_optimizer": run.use_precision_aware_optimizer,
        # Megatron skips the norm when clipping is off; an infinite limit reports it all the same.
        "clip_grad": run.gradient_clipping or float("inf"),
    }
    return OptimizerConfig(**{**settings, **_named(run.engine.optimizer)})
