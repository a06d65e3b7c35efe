"""`accelerate-megatron verify HF_DIR`: does our model compute what transformers' does?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from accelerate_megatron.cli.command_line import UsageError
from accelerate_megatron.cli.jobs import (
    PRECISIONS,
    check_model_folder,
    parse_with_launcher_flags,
    run_job,
)
from accelerate_megatron.errors import ConfigurationError

TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest difference that passes, as a part of the largest logit (of 1 at least)."""

_EXAMPLE = """
All other flags are those of `accelerate-megatron launch`: --tp_degree, --pp_degree,
--num_processes, --cpu, ...

example: on four CPU ranks
  accelerate-megatron verify ./llama --cpu --tp_degree 2 --pp_degree 2
"""


def main(argv: Sequence[str]) -> int:
    """Compare logits; return 0 when they are equal within the tolerance, 1 when not, 2 on misuse.

    Args:
        argv: The words after `verify`.
    """
    parser = _make_parser()
    args, flags = parse_with_launcher_flags(parser, argv)
    settings = {
        "folder": args.folder,
        "rows": args.rows,
        "length": args.length,
        "seed": args.seed,
    }
    try:
        _check(args)
        report = run_job(
            "accelerate_megatron.cli.verify_ranks",
            settings,
            [*flags, "--mixed_precision", PRECISIONS[args.dtype]],
        )
    except (UsageError, ConfigurationError) as error:
        parser.error(str(error))
    if report is None:
        return 1
    tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    report = judge(report, tolerance=tolerance, dtype=args.dtype)
    print(json.dumps(report, indent=2) if args.json else describe(report))
    return 0 if report["equal"] else 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron verify",
        usage="accelerate-megatron verify HF_DIR [flags]",
        description="Compare the logits of a Hugging Face model with those of the same weights "
        "on Megatron-Core, for random tokens.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="HF_DIR", help="folder with config and weights")
    parser.add_argument("--rows", type=int, default=2, metavar="N", help="sequences (2)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of each (64)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the tokens (0)")
    parser.add_argument(
        "--dtype", choices=PRECISIONS, default="float32", help="of both models (float32)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference that passes, as a part of the largest logit "
        "(1e-5; 3e-2 in bfloat16)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _check(args: argparse.Namespace) -> None:
    check_model_folder(args.folder)
    for name in ("rows", "length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: it must be at least 1.")
    if args.tolerance is not None and args.tolerance < 0:
        raise UsageError(f"--tolerance {args.tolerance}: it cannot be negative.")


def judge(report: dict[str, Any], *, tolerance: float, dtype: str) -> dict[str, Any]:
    """Return the report with the limit, the verdict and the first token beyond the limit.

    Args:
        report: What the ranks found; `differences` is the largest per token.
        tolerance: A part of the largest logit.
        dtype: Of both models.
    """
    limit = tolerance * max(1.0, report["largest_logit"])
    differences = report.pop("differences")
    beyond = (
        {
            "row": row,
            "position": position,
            "difference": value,
            "token": report["tokens"][row][position],
        }
        for row, values in enumerate(differences)
        for position, value in enumerate(values)
        if not value <= limit  # so that NaN is beyond it
    )
    first = next(beyond, None)
    return {**report, "dtype": dtype, "limit": limit, "equal": first is None, "first": first}


def _what(report: dict[str, Any]) -> str:
    number, compared = report["num_values"], report["compared"]
    return f"{number} logits each" if compared == "logits" else f"{number} of {compared} each"


def describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    rows, length = len(report["tokens"]), len(report["tokens"][0])
    layout = ", ".join(f"{name} {size}" for name, size in report["layout"].items())
    lines = [
        f"{report['folder']}: {report['model_type']}, {report['dtype']}, {layout}",
        f"{rows} x {length} tokens, {_what(report)}",
        f"largest logit       {report['largest_logit']:.6g}",
        f"largest difference  {report['largest_difference']:.3e} (limit {report['limit']:.3e})",
        f"same best token     {report['same_best']} of {report['num_places']}",
    ]
    first = report["first"]
    if first is None:
        return "\n".join([*lines, "equal"])
    lines.append(
        f"DIFFERENT, first at row {first['row']}, position {first['position']} "
        f"(token {first['token']}): {first['difference']:.3e}"
    )
    return "\n".join(lines)
