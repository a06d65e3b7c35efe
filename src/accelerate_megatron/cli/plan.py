"""`accelerate-megatron plan`: the layouts a model can train in on a number of devices."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate_megatron.errors import ConfigurationError
from accelerate_megatron.models.registry import family_of
from accelerate_megatron.models.shape import ModelShape
from accelerate_megatron.planning.config_file import read_config
from accelerate_megatron.planning.nearest import nearest_words
from accelerate_megatron.planning.parameters import total_parameters
from accelerate_megatron.planning.report import (
    as_values,
    plugin_arguments,
    rank_grid,
    table,
    timeline,
)
from accelerate_megatron.planning.search import Plan, PlanRequest, find_plans

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DRAWN_MICRO_BATCHES = 8
_DEFAULT_MICRO_BATCHES = 8
_DEFAULT_LENGTH = 512
"""Of a model whose positions have no end."""

_EXAMPLE = """example:
  accelerate-megatron plan Llama-3.1-8B/config.json --devices 16 --memory 80GB

Numbers are predictions for AdamW with fp32 gradients, from the shapes alone; no model is
loaded and no device needed. "saving" is the least that makes a layout fit.
"""


def main(argv: Sequence[str]) -> int:
    """Print the legal layouts of a model, best first; return the exit status.

    0: some layout fits; 1: none does; 2: the question itself is wrong.
    """
    args = _parse(argv)
    try:
        config = read_config(args.model)
        family = family_of(config)
        shape = family.shape(config)
        _check_decoder_length(args.decoder_seq_length, shape)
        request = PlanRequest(
            num_devices=args.devices,
            memory_bytes=None if args.memory is None else _bytes(args.memory),
            global_batch_size=_global_batch(args, args.devices),
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length or shape.max_positions or _DEFAULT_LENGTH,
            decoder_seq_length=args.decoder_seq_length,
            precision=args.mixed_precision,
            devices_per_node=args.devices_per_node,
        )
    except ConfigurationError as error:
        print(f"accelerate-megatron plan: {error}", file=sys.stderr)
        return 2
    plans = find_plans(family, shape, request)
    fits = any(plan.fits for plan in plans)
    advice = (
        ""
        if fits
        else nearest_words(family, shape, request, plans, lambda n: _global_batch(args, n))
    )
    if args.json:
        print(json.dumps([as_values(plan) for plan in plans[: args.top]], indent=2))
        if advice:
            print(f"accelerate-megatron plan: no layout fits. {advice}", file=sys.stderr)
    else:
        print(_text(plans, args.top, total_parameters(family, shape), request, advice))
    return 0 if fits else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron plan",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="a config.json, or a folder that holds one")
    add("--devices", type=_positive, required=True, help="devices of the job")
    add("--memory", help="memory of one device, such as 80GB (default: no limit)")
    add("--seq_length", "--seq-length", type=_positive, help="tokens of a sequence (the model's)")
    add(
        "--decoder_seq_length",
        "--decoder-seq-length",
        type=_positive,
        help="tokens of a decoder beside an encoder (as many)",
    )
    add("--micro_batch_size", "--micro-batch-size", type=_positive, default=1)
    add(
        "--global_batch_size",
        "--global-batch-size",
        type=_positive,
        help="sequences of an update (devices x micro-batch x 8)",
    )
    add(
        "--mixed_precision",
        "--mixed-precision",
        choices=("no", "bf16", "fp16"),
        default="bf16",
        help="dtype of the parameters",
    )
    add("--devices_per_node", "--devices-per-node", type=_positive, default=8)
    add("--top", type=_positive, default=10, help="layouts to show")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def _global_batch(args: argparse.Namespace, devices: int) -> int:
    """Return the sequences of an update on `devices` devices: as asked, or 8 micro-batches each."""
    asked: int | None = args.global_batch_size
    return asked or devices * int(args.micro_batch_size) * _DEFAULT_MICRO_BATCHES


def _check_decoder_length(length: int | None, shape: ModelShape) -> None:
    if length is not None and shape.encoder_decoder is None:
        raise ConfigurationError(
            f"--decoder_seq_length is {length}, but a {shape.model_type} model has one stack of "
            "layers; give --seq_length."
        )


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number


def _bytes(word: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([a-zA-Z]*)\s*", word)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigurationError(
            f"--memory is {word!r}; it must be a number with a unit, such as 80GB or 24GiB."
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _text(
    plans: Sequence[Plan], top: int, num_parameters: int, request: PlanRequest, advice: str
) -> str:
    intro = (
        f"{num_parameters / 1e9:.2f}B parameters on {request.num_devices} devices, "
        f"{request.seq_length} tokens x {request.micro_batch_size} a micro-batch, "
        f"{request.global_batch_size} sequences an update, {request.precision}"
    )
    if not plans:
        return (
            f"{intro}\nNo layout divides this model, {request.num_devices} devices and a global "
            f"batch of {request.global_batch_size}. {advice}"
        )
    best = plans[0]
    arguments = ", ".join(f"{name}={value!r}" for name, value in plugin_arguments(best).items())
    layout = best.layout
    parts = [
        intro,
        "",
        table(plans[:top]),
        "",
        f"best: MegatronLMPlugin({arguments})"
        if best.fits
        else f"No layout fits the memory. {advice}",
        "",
        rank_grid(layout.tp_size, layout.cp_size, layout.dp_size, layout.pp_size),
    ]
    if layout.pp_size > 1:
        shown = min(best.work.num_micro_batches, _DRAWN_MICRO_BATCHES)
        parts += ["", timeline(layout.pp_size, shown)]
    return "\n".join(parts)
