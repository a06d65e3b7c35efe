"""The text of `accelerate-megatron env --retarget`: all that is changed in Megatron-Core."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

from accelerate_megatron.cli.machine import count_cuda_devices
from accelerate_megatron.engine.retarget.report import PatchSummary, Rewrite, patches, rewrites
from accelerate_megatron.engine.retarget.rules import RULES


def retarget_json() -> str:
    """Return the rewritten places and the patches as JSON."""
    return json.dumps(
        {
            "rewrites": [dataclasses.asdict(place) for place in rewrites()],
            "patches": [dataclasses.asdict(patch) for patch in patches(_device_type())],
        },
        indent=2,
    )


def retarget_text() -> str:
    """Return the rewritten places, module by module, then the rules and the patches."""
    places = rewrites()
    return "\n".join(
        [
            *_place_lines(places),
            "",
            *_rule_lines(places),
            "",
            *_patch_lines(patches(_device_type())),
        ]
    )


def _device_type() -> str:
    return "cuda" if count_cuda_devices() else "cpu"


def _place_lines(places: list[Rewrite]) -> list[str]:
    lines = []
    for module, group in itertools.groupby(places, key=lambda place: place.module):
        lines.append(module)
        for place in group:
            before, after = (" ".join(text.split()) for text in (place.before, place.after))
            lines.append(f"  {place.line:>5}  {before}  ->  {after}  [{place.rule}]")
    return lines


def _rule_lines(places: list[Rewrite]) -> list[str]:
    hits = Counter(place.rule for place in places)
    here = "as on this machine" if _device_type() == "cpu" else "so not on this machine"
    lines = [
        f"{len(places)} places in {len({place.module for place in places})} modules are rewritten "
        f"while Megatron-Core is imported where there is no CUDA ({here}):"
    ]
    for rule in RULES:
        lines.append(f"  {hits[rule.name]:>5}  {rule.name}: {rule.rewrites}")
        lines.append(f"         {rule.why}")
    return lines


def _patch_lines(found: list[PatchSummary]) -> list[str]:
    lines = [f"Patches; * marks those applied here, on {_device_type()}:"]
    for patch in found:
        mark = "*" if patch.is_applied else " "
        lines.append(
            f"  {mark} {patch.symbol}, megatron-core {patch.since} to before {patch.before}"
        )
        lines.append(f"      where {patch.when}")
        lines.append(f"      {patch.why}")
    return lines
