"""The rules of expert parallelism: how experts are cut over the ranks of a job. No torch here."""

from __future__ import annotations

from accelerate_megatron.config.nearest import divisors, either
from accelerate_megatron.models.experts import Experts
from accelerate_megatron.models.shape import ModelShape


def expert_world_problems(
    *, world_size: int, ep_size: int, etp_size: int, pp_size: int
) -> list[str]:
    """Say whether the world can be cut into expert groups; empty when it can.

    The ranks of one pipeline stage are cut anew for the experts: etp_size ranks share an
    expert, ep_size such sets hold all experts, and what is left are replicas.

    Source: megatron-core 0.16.1, parallel_state.py, initialize_model_parallel.
    """
    size = ep_size * etp_size
    if size == 1 or world_size % (size * pp_size) == 0:
        return []
    stage = world_size // pp_size
    fitting = ", ".join(
        f"{ep} x {stage_part}"
        for ep in divisors(stage)
        for stage_part in divisors(stage // ep)
        if ep * stage_part > 1
    )
    return [
        f"{world_size} ranks cannot hold expert_model_parallel_size={ep_size} x "
        f"expert_tensor_parallel_size={etp_size} x pp_degree={pp_size} = {size * pp_size}: the "
        f"number of ranks must be a multiple of it. With pp_degree={pp_size} on {world_size} "
        f"ranks, expert_model_parallel_size x expert_tensor_parallel_size can be 1 x 1"
        f"{', ' + fitting if fitting else ''}."
    ]


def expert_model_problems(
    shape: ModelShape, *, ep_size: int, etp_size: int, tp_size: int, sequence_parallel: bool
) -> list[str]:
    """Say why the experts of `shape` cannot be cut up this way; empty when they can."""
    experts = shape.experts
    if experts is None:
        return [
            f"{name} is {size}, but a {shape.model_type} model has no experts; leave it out."
            for name, size in (
                ("expert_model_parallel_size", ep_size),
                ("expert_tensor_parallel_size", etp_size),
            )
            if size > 1
        ]
    return [
        *_size_problems(experts, ep_size, etp_size),
        *_sequence_problems(tp_size, sequence_parallel),
        *_shared_problems(experts, tp_size),
    ]


def _size_problems(experts: Experts, ep_size: int, etp_size: int) -> list[str]:
    problems = []
    if experts.num_experts % ep_size:
        problems.append(
            f"expert_model_parallel_size={ep_size} must divide the model's {experts.num_experts} "
            f"experts; it can be {either(divisors(experts.num_experts))}."
        )
    if experts.ffn_hidden_size % etp_size:
        problems.append(
            f"expert_tensor_parallel_size={etp_size} must divide the {experts.ffn_hidden_size} "
            "feed-forward channels of an expert; it can be "
            f"{either(divisors(experts.ffn_hidden_size)[:8])}."
        )
    return problems


def _sequence_problems(tp_size: int, sequence_parallel: bool) -> list[str]:
    if tp_size == 1 or sequence_parallel:
        return []
    # Without it each tensor-parallel rank would send every token to the experts.
    return [
        f"tp_degree is {tp_size} and sequence_parallelism is off: a model with experts needs it, "
        "so that each tensor-parallel rank routes tokens of its own. Set sequence_parallelism to "
        "True, or tp_degree to 1."
    ]


def _shared_problems(experts: Experts, tp_size: int) -> list[str]:
    channels = experts.shared_ffn_hidden_size
    if channels is None or channels % tp_size == 0:
        return []
    return [
        f"tp_degree={tp_size} must divide the {channels} feed-forward channels of the shared "
        f"expert; it can be {either(divisors(channels)[:8])}."
    ]
