"""The layouts of the parity matrix, and the models that each is run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.helpers.tiny_models import TinyModel
from tests.parity.training import LayoutCase

MODELS = {
    "gpt2": TinyModel("gpt2"),  # tied, learned positions, biases
    "llama": TinyModel("llama", tied=False),  # rotary positions, grouped queries, gated MLP
    "mixtral": TinyModel("mixtral", tied=False),  # four experts, two of them for a token
}
DENSE = ("gpt2", "llama")
ALL = tuple(MODELS)

TP2 = {"tp_degree": 2}
TP2_SP = {"tp_degree": 2, "sequence_parallelism": True}
TP4_SP = {"tp_degree": 4, "sequence_parallelism": True}
PP2 = {"pp_degree": 2}
PP4 = {"pp_degree": 4}
VP2 = {"num_layers_per_virtual_pipeline_stage": 1}  # of stages of two layers
CP2 = {"context_parallel_size": 2}
CP4 = {"context_parallel_size": 4}
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
ETP2 = {"expert_tensor_parallel_size": 2}
DIST = {"use_distributed_optimizer": True}
FSDP = {"use_custom_fsdp": True}
OFFLOAD = {"optimizer_cpu_offload": True}
FULL = {"recompute_granularity": "full"}
BLOCK = {**FULL, "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}


def other(**arguments: Any) -> dict[str, Any]:
    return {"other_megatron_args": arguments}


ULYSSES = other(cp_comm_type="a2a")
OVERLAP = {
    **DIST,
    # Small enough for several buckets in so small a model.
    **other(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=20000),
}
ALLGATHER = {"seq_length": 24, **other(moe_token_dispatcher_type="allgather")}
GROUPED = other(moe_grouped_gemm=True)
CAPACITY = {
    "seq_length": 24,
    # Two of four experts for each token: twice the even share holds all tokens.
    **other(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True),
}


@dataclass(frozen=True)
class MatrixLayout:
    """One row of the matrix."""

    name: str
    case: LayoutCase
    families: tuple[str, ...]


def row(
    name: str,
    ranks: int,
    *parts: dict[str, Any],
    families: tuple[str, ...] = ALL,
    micro_batches: int = 2,
) -> MatrixLayout:
    plugin = {key: value for part in parts for key, value in part.items()}
    return MatrixLayout(name, LayoutCase(ranks, plugin, micro_batches), families)


_MIXTRAL = ("mixtral",)

LAYOUTS = [
    row("one rank", 1),
    row("one rank, 4 micro-batches", 1, micro_batches=4),
    # One axis.
    row("TP2", 2, TP2, families=DENSE),
    row("TP2 SP", 2, TP2_SP),
    row("TP4", 4, {"tp_degree": 4}, families=DENSE),
    row("TP4 SP", 4, TP4_SP),
    row("PP2", 2, PP2, micro_batches=4),
    row("PP4", 4, PP4, micro_batches=4),
    row("PP2, 1 micro-batch", 2, PP2, micro_batches=1),
    row("PP4, 2 micro-batches", 4, PP4),
    row("PP2, stages of 3+1", 2, PP2, {"decoder_last_pipeline_num_layers": 1}, micro_batches=4),
    row("PP3, stages of 1+1+2", 3, {"pp_degree": 3, "decoder_last_pipeline_num_layers": 2}),
    row("PP2 VP2", 2, PP2, VP2, micro_batches=4),
    row("CP2", 2, CP2),
    row("CP4", 4, CP4),
    row("CP2 Ulysses", 2, CP2, ULYSSES),
    row("CP4 Ulysses", 4, CP4, ULYSSES, families=("gpt2",)),
    row("DP2", 2),
    row("DP4", 4),
    row("DP8", 8, micro_batches=1),
    row("EP2", 2, EP2, families=_MIXTRAL),
    row("EP4", 4, EP4, families=_MIXTRAL),
    # Two axes.
    row("TP2 SP DP2", 4, TP2_SP),
    row("TP2 PP2", 4, TP2, PP2, families=DENSE),
    row("TP2 SP PP2", 4, TP2_SP, PP2),
    row("TP2 SP PP2 VP2", 4, TP2_SP, PP2, VP2),
    row("PP2 DP2", 4, PP2),
    row("PP2 VP2 DP2", 4, PP2, VP2),
    row("CP2 TP2 SP", 4, CP2, TP2_SP),
    row("CP2 TP2 SP Ulysses", 4, CP2, TP2_SP, ULYSSES, families=("gpt2",)),
    row("CP2 PP2", 4, CP2, PP2),
    row("CP2 PP2 VP2", 4, CP2, PP2, VP2),
    row("CP2 DP2", 4, CP2),
    # Three axes and more, on eight ranks.
    row("TP2 SP PP2 DP2", 8, TP2_SP, PP2),
    row("TP2 SP PP2 VP2 DP2", 8, TP2_SP, PP2, VP2),
    row("TP4 SP PP2", 8, TP4_SP, PP2),
    row("TP2 SP PP4", 8, TP2_SP, PP4, micro_batches=4),
    row("CP2 TP2 SP PP2", 8, CP2, TP2_SP, PP2),
    row("CP2 TP2 SP PP2 VP2", 8, CP2, TP2_SP, PP2, VP2),
    row("CP2 TP2 SP DP2", 8, CP2, TP2_SP),
    row("CP2 PP2 DP2", 8, CP2, PP2),
    row("CP4 TP2 SP", 8, CP4, TP2_SP),
    # Experts.
    row("EP2 DP4", 4, EP2, families=_MIXTRAL),
    row("EP2 TP2 SP", 2, EP2, TP2_SP, families=_MIXTRAL),
    row("EP2 TP2 SP DP2", 4, EP2, TP2_SP, families=_MIXTRAL),
    row("ETP2 TP2 SP", 2, ETP2, TP2_SP, families=_MIXTRAL),
    row("EP2 ETP2 TP2 SP DP2", 4, EP2, ETP2, TP2_SP, families=_MIXTRAL),
    row("EP2 ETP2 TP2 SP DP4", 8, EP2, ETP2, TP2_SP, families=_MIXTRAL),
    row("EP4 ETP2 TP2 SP DP4", 8, EP4, ETP2, TP2_SP, families=_MIXTRAL),
    row("EP4 TP2 SP DP2", 4, EP4, TP2_SP, families=_MIXTRAL),
    row("EP2 PP2 DP2", 4, EP2, PP2, families=_MIXTRAL),
    row("EP2 PP2 VP2 DP2", 4, EP2, PP2, VP2, families=_MIXTRAL),
    row("EP2 TP2 SP PP2 DP2", 8, EP2, TP2_SP, PP2, families=_MIXTRAL),
    row("EP2 ETP2 TP2 SP PP2 DP2", 8, EP2, ETP2, TP2_SP, PP2, families=_MIXTRAL),
    row("EP2 CP2", 2, EP2, CP2, families=_MIXTRAL),
    row("EP2 CP2 DP2", 4, EP2, CP2, families=_MIXTRAL),
    row("EP4 CP2 TP2 SP DP2", 8, EP4, CP2, TP2_SP, families=_MIXTRAL),
    row("EP2 CP2 PP2 DP2", 8, EP2, CP2, PP2, families=_MIXTRAL),
    row("EP2 DP2, all-gather dispatcher", 2, EP2, ALLGATHER, families=_MIXTRAL),
    row(
        "EP2 ETP2 TP2 SP, all-gather dispatcher", 4, EP2, ETP2, TP2_SP, ALLGATHER, families=_MIXTRAL
    ),
    row("EP2 DP2, grouped experts", 2, EP2, GROUPED, families=_MIXTRAL),
    row("EP2 DP2, padded capacity", 2, EP2, CAPACITY, families=_MIXTRAL),
    # Sharded training state.
    row("DP2, distributed optimizer", 2, DIST),
    row("DP4, distributed optimizer", 4, DIST),
    row("DP2, distributed optimizer, overlap", 2, OVERLAP),
    row("TP2 SP DP2, distributed optimizer", 4, TP2_SP, DIST),
    row("PP2 DP2, distributed optimizer", 4, PP2, DIST),
    row("PP2 VP2 DP2, distributed optimizer, overlap", 4, PP2, VP2, OVERLAP),
    row("CP2, distributed optimizer", 2, CP2, DIST),
    row("CP2 TP2 SP PP2, distributed optimizer", 8, CP2, TP2_SP, PP2, DIST),
    row("TP2 SP PP2 VP2 DP2, distributed optimizer, overlap", 8, TP2_SP, PP2, VP2, OVERLAP),
    row("EP2 DP4, distributed optimizer", 4, EP2, DIST, families=_MIXTRAL),
    row(
        "EP2 ETP2 TP2 SP PP2 DP2, distributed optimizer",
        8,
        EP2,
        ETP2,
        TP2_SP,
        PP2,
        DIST,
        families=_MIXTRAL,
    ),
    row("DP2, FSDP2", 2, FSDP, families=("llama", "mixtral")),
    row("TP2 SP DP2, FSDP2", 4, TP2_SP, FSDP, families=("llama",)),
    row("CP2 DP2, FSDP2", 4, CP2, FSDP, families=("llama", "mixtral")),
    row("one rank, offloaded optimizer", 1, OFFLOAD),
    row("DP2, distributed and offloaded optimizer", 2, DIST, OFFLOAD),
    row("EP2, distributed and offloaded optimizer", 2, EP2, DIST, OFFLOAD, families=_MIXTRAL),
    # Recomputation.
    row("one rank, full recomputation", 1, FULL),
    row("TP2 SP PP2, full recomputation", 4, TP2_SP, PP2, FULL),
    row("PP2 VP2, recomputed blocks", 2, PP2, VP2, BLOCK),
    row("CP2, selective recomputation", 2, CP2, SELECTIVE),
    row("DP2, FSDP2, full recomputation", 2, FSDP, FULL, families=("llama",)),
    row(
        "EP2 TP2 SP DP2, recomputed experts",
        4,
        EP2,
        TP2_SP,
        SELECTIVE,
        other(recompute_modules=["moe"]),
        families=_MIXTRAL,
    ),
    row(
        "CP2 TP2 SP PP2 VP2, distributed optimizer, full recomputation",
        8,
        CP2,
        TP2_SP,
        PP2,
        VP2,
        DIST,
        FULL,
    ),
]
