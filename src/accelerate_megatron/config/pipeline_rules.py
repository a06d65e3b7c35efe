"""The rules of pipelines: which stage gets how many layers. No torch here."""

from __future__ import annotations

from accelerate_megatron.config.nearest import divisors, either


def stage_layers(num_layers: int, *, pp_size: int, last_stage_layers: int | None) -> list[int]:
    """Return the layers of each stage, which `pipeline_problems` must have found possible."""
    if last_stage_layers is None:
        return [num_layers // pp_size] * pp_size
    others = (num_layers - last_stage_layers) // max(pp_size - 1, 1)
    return [others] * (pp_size - 1) + [last_stage_layers]


def last_stages(num_layers: int, pp_size: int) -> list[int]:
    """Return the sizes of a last stage that leave an even split for the others."""
    if pp_size == 1:
        return []
    return [
        last
        for last in range(1, num_layers - pp_size + 2)
        if (num_layers - last) % (pp_size - 1) == 0
    ]


def pipeline_problems(
    num_layers: int, *, pp_size: int, last_stage_layers: int | None, world_size: int
) -> list[str]:
    """Return why the layers cannot be split over the stages; empty when they can."""
    working = last_stages(num_layers, pp_size)
    if last_stage_layers is None:
        if num_layers % pp_size == 0:
            return []
        degrees = [pp for pp in divisors(world_size) if num_layers % pp == 0]
        uneven = (
            f", or set decoder_last_pipeline_num_layers to {either(working)}" if working else ""
        )
        return [
            f"pp_degree={pp_size} must divide the model's {num_layers} layers. On {world_size} "
            f"ranks, pp_degree can be {either(degrees)}{uneven}."
        ]
    if pp_size == 1:
        return [
            f"decoder_last_pipeline_num_layers is {last_stage_layers} but pp_degree is 1: there is "
            "one stage, with all layers. Set pp_degree to 2 or more, or leave "
            "decoder_last_pipeline_num_layers out."
        ]
    if last_stage_layers in working:
        return []
    splits = "; ".join(
        f"{last} (stages of {_listed(num_layers, pp_size, last)})" for last in working
    )
    return [
        f"decoder_last_pipeline_num_layers={last_stage_layers} leaves "
        f"{num_layers - last_stage_layers} of the model's {num_layers} layers for "
        f"{pp_size - 1} other stage{'s' if pp_size > 2 else ''}, which must get equal numbers and "
        f"at least one each. It can be {splits or 'no number: pp_degree is too large'}."
    ]


def interleaving_problems(
    num_layers: int,
    num_micro_batches: int,
    *,
    pp_size: int,
    layers_per_virtual_stage: int | None,
    last_stage_layers: int | None,
) -> list[str]:
    """Return why the stages cannot be cut into chunks; called when the stages themselves fit."""
    size = layers_per_virtual_stage
    if size is None:
        return []
    problems = []
    stages = stage_layers(num_layers, pp_size=pp_size, last_stage_layers=last_stage_layers)
    per_stage = stages[0]
    chunks = per_stage // size if size >= 1 else 0
    if size < 1 or per_stage % size or chunks < 2:
        working = [n for n in range(1, per_stage) if per_stage % n == 0]
        problems.append(
            f"num_layers_per_virtual_pipeline_stage={size} must divide the {per_stage} "
            f"layers of a stage ({_origin(num_layers, pp_size, last_stage_layers)}) into "
            f"two chunks or more; it can be {either(working)}."
        )
    elif stages[-1] % chunks:
        problems.append(
            f"num_layers_per_virtual_pipeline_stage={size} makes {chunks} chunks of each stage of "
            f"{per_stage} layers, and {chunks} must divide the last stage's "
            f"decoder_last_pipeline_num_layers={last_stage_layers} too. Set the latter to a "
            f"multiple of {chunks}, or leave num_layers_per_virtual_pipeline_stage out."
        )
    if num_micro_batches % pp_size:
        up = -(-num_micro_batches // pp_size) * pp_size
        problems.append(
            f"num_micro_batches={num_micro_batches} must be a multiple of "
            f"pp_degree={pp_size} with virtual stages, since interleaved 1F1B runs them "
            f"in rounds of pp_degree. Set num_micro_batches to {up}, or leave "
            "num_layers_per_virtual_pipeline_stage out."
        )
    return problems


def _origin(num_layers: int, pp_size: int, last_stage_layers: int | None) -> str:
    if last_stage_layers is None:
        return f"{num_layers} layers / pp_degree={pp_size}"
    return f"{num_layers} layers less {last_stage_layers} / {pp_size - 1}"


def _listed(num_layers: int, pp_size: int, last: int) -> str:
    stages = stage_layers(num_layers, pp_size=pp_size, last_stage_layers=last)
    return "+".join(str(layers) for layers in stages)
