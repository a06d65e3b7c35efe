"""Which ways to run a mixture of experts go together. No torch here."""

from __future__ import annotations

from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.models.experts import Experts


def expert_settings_problems(run: RunConfig, *, seq_length: int | None) -> list[str]:
    """Say why the experts of `run` cannot be run as it asks; empty when they can.

    Args:
        run: The run, with `other_megatron_args` in it.
        seq_length: The length that all batches have; None when each has its own.
    """
    experts = run.shape.experts
    if experts is None:
        return []
    return [
        *_capacity_problems(run),
        *_length_problems(run, seq_length),
        *_router_problems(run, experts),
    ]


def _capacity_problems(run: RunConfig) -> list[str]:
    settings = run.experts
    factor = settings.capacity_factor
    if factor is not None:
        if factor > 0:
            return []
        return [
            f"moe_expert_capacity_factor is {factor}; it must be above 0, and 1.0 lets every "
            "expert take an even share. Leave it out to drop no tokens."
        ]
    without_effect = {
        "moe_pad_expert_input_to_capacity=True": settings.pad_to_capacity,
        f"moe_token_drop_policy={settings.drop_policy!r}": settings.drop_policy != "probs",
    }
    return [
        f"{setting} has no effect without moe_expert_capacity_factor; set it too, or leave "
        f"{setting.split('=')[0]} out."
        for setting, is_given in without_effect.items()
        if is_given
    ]


def _length_problems(run: RunConfig, seq_length: int | None) -> list[str]:
    """Refuse exchanges of equal pieces between ranks whose batches differ in length."""
    layout, settings = run.layout, run.experts
    of_one_replica = layout.tp_size * layout.cp_size
    if seq_length is not None or of_one_replica % (layout.ep_size * layout.etp_size) == 0:
        return []
    equal = {
        "moe_token_dispatcher_type='allgather'": settings.dispatcher == "allgather",
        "moe_pad_expert_input_to_capacity=True": settings.pad_to_capacity,
    }
    return [
        f"{setting} needs seq_length: expert_model_parallel_size={layout.ep_size} x "
        f"expert_tensor_parallel_size={layout.etp_size} puts the experts of a layer on several "
        "data-parallel replicas, which exchange pieces of one size, and without seq_length each "
        "replica pads its batches to their own longest sequence. Set seq_length, or "
        "moe_token_dispatcher_type to 'alltoall' and no padding to capacity."
        for setting, is_on in equal.items()
        if is_on
    ]


def _router_problems(run: RunConfig, experts: Experts) -> list[str]:
    settings = run.experts
    problems = []
    if settings.bias_update_rate and not experts.correction_bias:
        problems.append(
            f"moe_router_bias_update_rate is {settings.bias_update_rate}, but the router of a "
            f"{run.shape.model_type} model has no correction bias; leave it out."
        )
    if settings.load_balancing != "aux_loss" and not experts.balance_coefficient:
        problems.append(
            f"moe_router_load_balancing_type={settings.load_balancing!r} has no effect without a "
            "coefficient; set moe_aux_loss_coeff, or leave it out."
        )
    return problems
