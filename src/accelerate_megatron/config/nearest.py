"""The layouts that work nearest to one that does not; how a world can be cut at all. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, product
from math import log2
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from accelerate_megatron.config.layout import Layout
    from accelerate_megatron.models.shape import ModelShape

_SHOWN = 3
_OTHER_SETTING = 0.5
"""What a changed setting costs; a degree costs 1 for each time that it is doubled or halved."""
_FIELDS = {
    "tp_size": "tp_degree",
    "pp_size": "pp_degree",
    "cp_size": "context_parallel_size",
    "ep_size": "expert_model_parallel_size",
    "etp_size": "expert_tensor_parallel_size",
    "sequence_parallel": "sequence_parallelism",
    "cp_comm_type": "cp_comm_type",
    "split_rank": "pipeline_model_parallel_split_rank",
    "last_stage_layers": "decoder_last_pipeline_num_layers",
    "layers_per_virtual_stage": "num_layers_per_virtual_pipeline_stage",
}
"""The plugin's names, in the order in which they are shown."""
_ALWAYS_SHOWN = ("tp_size", "pp_size")
_OFF = {"cp_size": 1, "ep_size": 1, "etp_size": 1, "sequence_parallel": False}


class Degrees(TypedDict):
    """Sizes of the axes that cut a world, as fields of `Layout`."""

    tp_size: int
    pp_size: int
    cp_size: int
    ep_size: int


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def degrees(world_size: int, num_experts: int | None) -> Iterator[Degrees]:
    """Yield every way to cut `world_size` ranks.

    Args:
        world_size: Ranks.
        num_experts: Experts of a layer; None: ep is 1.
    """
    for tp in divisors(world_size):
        for pp in divisors(world_size // tp):
            stage = world_size // pp
            experts = [ep for ep in divisors(num_experts or 1) if stage % ep == 0]
            for cp, ep in product(divisors(stage // tp), experts):
                yield Degrees(tp_size=tp, pp_size=pp, cp_size=cp, ep_size=ep)


def either(choices: Iterable[int]) -> str:
    """Return "1 or 2 or 4", or "no number"."""
    return " or ".join(str(choice) for choice in choices) or "no number"


def nearest_multiples(number: int, size: int) -> str:
    """Return the multiples of `size` around `number`, "4 or 8"."""
    below, above = number // size * size, -(-number // size) * size
    return f"{below} or {above}" if below else str(above)


def nearest_layouts(
    layout: Layout, fits: Callable[[Layout], bool], shape: ModelShape | None = None
) -> str | None:
    """Return a sentence with up to three layouts that fit, least changed first; None: none does.

    It goes at the end of a refusal, and names the plugin's fields.

    Args:
        layout: The one that was refused, with sizes of at least 1; its world stays.
        fits: Whether a layout can run: the rules that refused this one.
        shape: The model; None before it is known.
    """
    candidates = [
        {**sizes, **others}
        for sizes in degrees(layout.world_size, _experts(layout, shape))
        for others in _other_settings(layout, sizes, shape)
    ]
    candidates.sort(key=lambda fields: _distance(layout, fields))
    found = filter(fits, (replace(layout, **fields) for fields in candidates))
    named = [_named(layout, other) for other in islice(_one_of_each_cut(found), _SHOWN)]
    if not named:
        return None
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    return f"Nearest that works on {ranks}: {'; or '.join(named)}."


def _one_of_each_cut(layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yield the first of those layouts that cut the world alike."""
    seen = set()
    for layout in layouts:
        cut = (layout.tp_size, layout.pp_size, layout.cp_size, layout.ep_size)
        if cut not in seen:
            seen.add(cut)
            yield layout


def _experts(layout: Layout, shape: ModelShape | None) -> int | None:
    """Return the experts that may be spread; of an unknown model as many as there are ranks."""
    if shape is None:
        return layout.world_size if layout.ep_size > 1 else None
    return None if shape.experts is None else shape.experts.num_experts


def _other_settings(
    layout: Layout, sizes: Degrees, shape: ModelShape | None
) -> Iterator[dict[str, Any]]:
    """Yield what else may have to change with the sizes: as it was asked for, or off."""
    staged, stage = sizes["pp_size"] > 1, layout.world_size // sizes["pp_size"]
    two_stacks = shape is not None and shape.encoder_decoder is not None
    splits = range(1, sizes["pp_size"]) if two_stacks else [layout.split_rank, None]
    options: dict[str, list[Any]] = {
        "etp_size": [layout.etp_size, *(divisors(stage) if layout.etp_size > 1 else [1])],
        "sequence_parallel": [layout.sequence_parallel, True] if sizes["tp_size"] > 1 else [False],
        "cp_comm_type": [layout.cp_comm_type, "all_gather"],
        "split_rank": list(splits) if staged else [None],
        "last_stage_layers": [layout.last_stage_layers, None] if staged else [None],
        "layers_per_virtual_stage": [layout.layers_per_virtual_stage, None] if staged else [None],
    }
    names, values = options.keys(), (dict.fromkeys(choices) for choices in options.values())
    for chosen in product(*values):
        yield dict(zip(names, chosen, strict=True))


def _distance(layout: Layout, fields: dict[str, Any]) -> float:
    distance = 0.0
    for name, value in fields.items():
        asked = getattr(layout, name)
        if name.endswith("_size"):
            distance += abs(log2(value / asked))
        elif value != asked:
            distance += _OTHER_SETTING
    return distance


def _named(asked: Layout, layout: Layout) -> str:
    """Name the degrees, and every other setting that is in use or differs from what was asked."""
    parts = []
    for name, field in _FIELDS.items():
        value = getattr(layout, name)
        is_off = value == _OFF.get(name, None if name != "cp_comm_type" else "all_gather")
        if name in _ALWAYS_SHOWN or not is_off or value != getattr(asked, name):
            parts.append(f"{field}={value!r}")
    return ", ".join(parts)
