"""Mixture of experts: Megatron's settings for it, its layer spec, and the router.

Everything a run says about experts becomes Megatron's here. What balances the load of the
experts is in `balancing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from accelerate_megatron.config.megatron_names import DISPATCH, EXPERTS, given_values, values_of
from accelerate_megatron.config.run import ExpertSettings, RunConfig
from accelerate_megatron.engine.balancing import LoadBalance
from accelerate_megatron.engine.grouped_experts import grouped
from accelerate_megatron.engine.wrapping import innermost
from accelerate_megatron.errors import EngineError
from accelerate_megatron.models.experts import Experts

NORM_OF_DENSE_LAYERS = "pre_mlp_layernorm."
"""The prefix that Megatron's local spec renames, as if the norm were fused into `linear_fc1`."""


def expert_config(run: RunConfig) -> dict[str, Any]:
    """Return the arguments of Megatron's `TransformerConfig` for the experts of `run`."""
    experts, settings = run.shape.experts, run.experts
    if experts is None:
        return {}
    given = given_values(run)
    return {
        "expert_model_parallel_size": run.layout.ep_size,
        "expert_tensor_parallel_size": run.layout.etp_size,
        "num_moe_experts": experts.num_experts,
        "moe_layer_freq": [int(experts.are_in(n)) for n in range(run.shape.num_layers)],
        **values_of(EXPERTS, run),
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_shared_expert_gate": experts.shared_gate,
        **_router_config(experts, settings),
        **{name: given[name] for name in DISPATCH},
    }


def _router_config(experts: Experts, settings: ExpertSettings) -> dict[str, Any]:
    is_grouped = experts.num_groups > 1
    return {
        "moe_router_dtype": "fp32",
        "moe_router_score_function": experts.score,
        # Softmax over the chosen experts is softmax over all of them, made to add up to 1.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalize_top_k,
        "moe_router_topk_scaling_factor": (
            None if experts.scaling_factor == 1.0 else experts.scaling_factor
        ),
        "moe_router_num_groups": experts.num_groups if is_grouped else None,
        "moe_router_group_topk": experts.top_groups if is_grouped else None,
        "moe_router_enable_expert_bias": experts.correction_bias,
        # Megatron moves the bias at every update, by 0.001 unless told otherwise.
        "moe_router_bias_update_rate": settings.bias_update_rate,
        # Our own losses balance the load; Megatron's depend on how a batch is cut up.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


class BalancedRouter(TopKRouter):  # type: ignore[misc]  # megatron is untyped
    """Megatron's router, which tells a `LoadBalance` about its tokens where there is one.

    Attributes:
        balance: Set on all routers of a model whose load is balanced, else None.
    """

    balance: LoadBalance | None = None

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the map of the chosen experts, each [s x b, experts].

        Args:
            logits: [s, b, experts].
            padding_mask: Bool [s, b], True where a token is not one of the batch.
        """
        # Megatron reads the mask for its own balancing losses, which are off.
        probs, routing_map = super().routing(logits)
        if self.balance is not None and self.balance.is_active:
            if padding_mask is None:
                raise EngineError(
                    "The forward step took no micro-batch from its data iterator before it ran the "
                    "model, so the losses that balance experts cannot tell tokens from padding. "
                    "Read one micro-batch with next(data_iterator) for each call of the model."
                )
            probs = self.balance.route(logits, probs, padding_mask)
        return probs, routing_map


def balance_routers(chunks: Iterable[torch.nn.Module], balance: LoadBalance) -> None:
    """Connect all routers of this rank's chunks to `balance`; `hide_padding` says of what."""
    for chunk in chunks:
        for router in routers(chunk):
            router.balance = balance  # type: ignore[assignment]
        decoder: Any = innermost(chunk).decoder
        decoder.is_padding = None
        decoder.register_forward_pre_hook(_with_padding_mask, with_kwargs=True)


def hide_padding(chunk: torch.nn.Module, is_padding: torch.Tensor) -> None:
    """Say which tokens of the coming micro-batch the chunk's routers are not to count.

    Args:
        chunk: A chunk whose routers are balanced.
        is_padding: Bool [b, s], s being this rank's part of the sequence.
    """
    decoder: Any = innermost(chunk).decoder
    decoder.is_padding = is_padding


def _with_padding_mask(
    decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the decoder the mask as an argument, so that recomputed layers get the same again.

    Not through GPTModel's own argument: that is cut for sequence parallelism on the first
    pipeline stage only (megatron-core 0.16.1 to 0.19.2).
    """
    is_padding, decoder.is_padding = decoder.is_padding, None
    return args, {**kwargs, "padding_mask": is_padding}


def use_experts(layer: TransformerLayerSubmodules, settings: ExpertSettings) -> None:
    """Give a layer's spec experts in place of its MLP."""
    spec = get_moe_module_spec_for_backend(
        LocalSpecProvider(), num_experts=1, moe_grouped_gemm=False
    )
    # Newer versions of Megatron-Core give partials of the classes.
    submodules = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    submodules.router = BalancedRouter
    if settings.grouped:
        submodules.experts = grouped(submodules.experts)
    layer.mlp = spec
    layer.sharded_state_dict_keys_map.pop(NORM_OF_DENSE_LAYERS)


def keep_routers_in_fp32(chunk: torch.nn.Module) -> None:
    """Undo the cast to bf16 for the routers' weights, biases and counts of a chunk.

    A token's experts hang on small differences of scores. The correction bias moves by the counts
    of tokens, which bf16 would round from 256 on.
    """
    for router in routers(chunk):
        for kept in (router.weight, router.expert_bias, router.local_tokens_per_expert):
            if kept is not None:
                kept.data = kept.data.float()


def mark_experts(chunk: torch.nn.Module) -> None:
    """Mark the weights of a chunk's experts as what they are: replicated over other ranks.

    Megatron reduces gradients of marked weights over the replicas of experts, all others over
    the data-parallel ranks. It marks experts only where they are over several ranks
    (megatron-core 0.16.1; newer versions do as we do): with one expert-parallel rank and fewer
    expert-tensor-parallel ranks than tensor-parallel ones, the latter hold replicas whose
    gradients were never added up.
    """
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False


def routers(chunk: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """Return the routers of a chunk, in the order of its layers."""
    return (module for module in chunk.modules() if isinstance(module, Router))
