"""Recomputation, sharded state, offload: settings, and what they exclude. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accelerate_megatron.config.layout import Layout
from accelerate_megatron.config.nearest import either
from accelerate_megatron.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which activations are computed a second time in the backward pass, not kept."""

    granularity: Literal["full", "selective"]
    """Whole layers, or `modules` of each layer."""
    method: Literal["uniform", "block"] | None = None
    """For whole layers. "uniform": units of `num_layers` layers, of each the input is kept.
    "block": the first `num_layers` layers of each stage (or chunk) alone, the others not at all."""
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)
    """For parts of layers, in Megatron's words: core_attn, layernorm, mlp, moe, ..."""


def resolve_recompute(plugin: Any) -> Recompute | None:
    """Return the recomputation that the plugin asks for; the problems of both kinds come first."""
    if plugin.recompute_granularity == "full":
        return Recompute(
            granularity="full",
            method=plugin.recompute_method or "uniform",
            num_layers=plugin.recompute_num_layers or 1,
        )
    if plugin.recompute_granularity == "selective" or plugin.recompute_activations:
        return Recompute(granularity="selective")
    return None


def recompute_setting_problems(values: Mapping[str, Any]) -> list[str]:
    """Return which of the plugin's settings of recomputation contradict or need another.

    Args:
        values: The plugin's fields by name.
    """
    granularity = values["recompute_granularity"]
    if granularity == "full":
        if not values["recompute_activations"]:
            return []
        return [
            "recompute_activations is on, which is selective recomputation, and "
            "recompute_granularity is 'full'; give one of the two."
        ]
    given = [
        f"{name}={values[name]!r}"
        for name in ("recompute_method", "recompute_num_layers")
        if values[name] is not None
    ]
    if not given:
        return []
    return [
        f"{' and '.join(given)} without recompute_granularity='full' would have no effect: it says "
        "which whole layers are recomputed. Set recompute_granularity to 'full', or leave it out."
    ]


def recompute_layer_problems(plugin: Any, layout: Layout, shape: ModelShape) -> list[str]:
    """Return why the layers of a stage cannot be recomputed in the plugin's units."""
    method, number = plugin.recompute_method, plugin.recompute_num_layers
    if plugin.recompute_granularity != "full" or number is None:
        return []
    chunks = layout.chunks_per_stage(shape.num_layers) or 1
    stages = [layers // chunks for layers in layout.layers_of_blocks(shape)]
    most = min(stages)
    where = "model chunk" if chunks > 1 else "stage" if layout.pp_size > 1 else "model"
    if method == "block":
        if 1 <= number <= most:
            return []
        return [
            f"recompute_num_layers={number} with recompute_method='block' must be from 1 to the "
            f"{most} layers of a {where}."
        ]
    working = [n for n in range(1, most + 1) if all(layers % n == 0 for layers in stages)]
    if number in working:
        return []
    return [
        f"recompute_num_layers={number} with recompute_method='uniform' must divide the "
        f"{' and the '.join(str(n) for n in sorted(set(stages)))} layers of a {where} into equal "
        f"units; it can be {either(working)}."
    ]


def recompute_module_problems(plugin: Any, shape: ModelShape) -> list[str]:
    """Return which parts of layers are to be recomputed that no layer of the model has."""
    experts, encoder = shape.experts, shape.encoder
    is_missing = {
        "layernorm": encoder is not None and encoder.norm_after,  # theirs stand after the sums
        "mlp": not shape.has_dense_layers,
        "moe": experts is None,
        "shared_experts": experts is None or experts.shared_ffn_hidden_size is None,
    }
    return [
        f"recompute_modules has {name!r}, and no layer of a {shape.model_type} model has such a "
        "part that can be recomputed. Leave it out."
        for name in plugin.routed_arguments.of("recompute").get("modules", ())
        if is_missing.get(name)
    ]


def offload_problems(
    plugin: Any, *, optimizer_kind: str | None, decoupled: bool, on_cuda: bool
) -> list[str]:
    """Return what is wrong with the plugin's offload of the optimizer.

    Args:
        plugin: The plugin.
        optimizer_kind: "adam" or "sgd"; None without an optimizer.
        decoupled: Whether weight decay is AdamW's.
        on_cuda: Whether the model is on a CUDA device.
    """
    problems = []
    if plugin.overlap_cpu_optimizer_d2h_h2d and not plugin.optimizer_cpu_offload:
        problems.append(
            "overlap_cpu_optimizer_d2h_h2d is on without optimizer_cpu_offload: it overlaps the "
            "copies of an optimizer in host memory. Set optimizer_cpu_offload to True, or leave it "
            "out."
        )
    elif plugin.overlap_cpu_optimizer_d2h_h2d and not on_cuda:
        problems.append(
            "overlap_cpu_optimizer_d2h_h2d is on, which overlaps copies between a CUDA device and "
            "the host, but the model is on the CPU: there is nothing to copy. Leave it out here."
        )
    if plugin.optimizer_cpu_offload and optimizer_kind == "adam" and not decoupled:
        problems.append(
            "optimizer_cpu_offload cannot run torch.optim.Adam, whose weight decay goes through "
            "the gradient; use torch.optim.AdamW or SGD, or leave optimizer_cpu_offload out."
        )
    return problems


def precision_aware_problems(plugin: Any, *, has_fused_adam: bool) -> list[str]:
    """Return why the precision-aware optimizer cannot run here; empty when it can or is off.

    Args:
        plugin: The plugin.
        has_fused_adam: Whether Transformer Engine is there and used.
    """
    if not plugin.use_precision_aware_optimizer:
        return []
    problems = []
    if not has_fused_adam:
        problems.append(
            "use_precision_aware_optimizer needs the FusedAdam of Transformer Engine 2.1 or newer, "
            "on CUDA; install it (pip install 'transformer-engine[pytorch]'), or leave "
            "use_precision_aware_optimizer out."
        )
    if not plugin.use_distributed_optimizer:
        problems.append(
            "use_precision_aware_optimizer needs use_distributed_optimizer; set it to True, or "
            "leave use_precision_aware_optimizer out."
        )
    return problems


def fsdp_precision_problems(plugin: Any, shape: ModelShape, precision: str) -> list[str]:
    """Return which precision fully sharded data parallelism cannot be combined with."""
    if not plugin.use_custom_fsdp:
        return []
    problems = []
    if precision == "fp16":
        problems.append(
            "mixed_precision is 'fp16' and use_custom_fsdp is on: each rank would look for "
            "overflow in its own rows, and the ranks would skip different updates. Set "
            "mixed_precision to 'bf16', or use use_distributed_optimizer."
        )
    if shape.experts is not None and precision != "no":
        problems.append(
            f"use_custom_fsdp is on and mixed_precision is {precision!r}: the routers of a "
            "model with experts stay fp32, and fully sharded data parallelism takes one dtype for "
            "all parameters of a layer. Set mixed_precision to 'no', or use "
            "use_distributed_optimizer."
        )
    return problems


def fsdp_problems(plugin: Any, layout: Layout, shape: ModelShape) -> list[str]:
    """Return what PyTorch's fully sharded data parallelism cannot be combined with."""
    if not plugin.use_custom_fsdp:
        return []
    others = [
        (
            shape.tied_embeddings,
            "the model ties its output layer to its word embedding, and the engine then mixes "
            "sharded and whole tensors. Untie them (tie_word_embeddings=False in the model's "
            "config), or use use_distributed_optimizer",
        ),
        (
            shape.encoder_decoder is not None,
            f"a {shape.model_type} model is not sharded this way. Use use_distributed_optimizer",
        ),
        (
            shape.encoder is not None,
            f"the layers and heads of a {shape.model_type} model are not sharded that way. Use "
            "use_distributed_optimizer",
        ),
        (
            layout.pp_size > 1,
            f"pp_degree is {layout.pp_size}, and each micro-batch of a pipeline would gather and "
            "reduce all parameters again. Set pp_degree to 1, or use use_distributed_optimizer",
        ),
        (
            plugin.use_distributed_optimizer,
            "use_distributed_optimizer is on, and fully sharded data parallelism shards the "
            "optimizer itself. Leave one of the two out",
        ),
        (
            plugin.optimizer_cpu_offload,
            "optimizer_cpu_offload is on, whose optimizer does not know sharded parameters. Leave "
            "one of the two out",
        ),
        (
            layout.ep_size > 1 or layout.etp_size > 1,
            "experts are spread over ranks, which have replicas of their own. Set "
            "expert_model_parallel_size and expert_tensor_parallel_size to 1, or use "
            "use_distributed_optimizer",
        ),
        (
            shape.experts is not None and layout.tp_size > 1,
            f"tp_degree is {layout.tp_size}, whose ranks hold replicas of the experts that it "
            "would not keep equal. Set tp_degree to 1, or use use_distributed_optimizer",
        ),
        (
            shape.experts is not None and shape.experts.correction_bias,
            "the model's routers have a correction bias, which is no parameter and would not be "
            "kept. Use use_distributed_optimizer",
        ),
    ]
    return [f"use_custom_fsdp is on and {why}." for is_so, why in others if is_so]
