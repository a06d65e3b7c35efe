"""`accelerate-megatron data`: indexed datasets of token ids, built, looked into and merged."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from accelerate_megatron.cli.machine import count_cores
from accelerate_megatron.errors import BuildStoppedError, ConfigurationError, DataFileError

_REFUSALS = (BuildStoppedError, ConfigurationError, DataFileError, ImportError, OSError)


def main(argv: Sequence[str]) -> int:
    """Run one of build, inspect and merge; return 0, or 1 when something is not right.

    Args:
        argv: The words after `data`.
    """
    args = _parser().parse_args(argv)
    try:
        facts, lines = args.action(args)
    except _REFUSALS as error:
        if args.json:
            print(json.dumps({"good": False, "problems": [str(error)]}, indent=2))
        else:
            print(f"accelerate-megatron data: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=2) if args.json else "\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron data",
        description="Indexed datasets: token ids in the .bin and .idx files that Megatron reads.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_build(actions)
    what = "check every field and token id, and show what is in a dataset"
    sub = actions.add_parser("inspect", help=what, description=what)
    sub.add_argument("prefix", help="of the .bin and .idx files")
    sub.add_argument("--tokenizer", help="to decode samples, and to compare ids with its size")
    sub.add_argument("--samples", type=int, default=3, help="how many documents to show")
    sub.set_defaults(action=_inspect)
    what = "write the documents of several datasets into one, in order"
    sub = actions.add_parser("merge", help=what, description=what)
    sub.add_argument("prefix", nargs="+", help="of the .bin and .idx files")
    sub.add_argument("--output-prefix", required=True)
    sub.add_argument("--overwrite", action="store_true", help="replace files that are there")
    sub.set_defaults(action=_merge)
    for sub in actions.choices.values():
        sub.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _add_build(actions: Any) -> None:
    what = "tokenize text, JSON lines, Parquet files or Hugging Face datasets"
    sub = actions.add_parser("build", help=what, description=what)
    sub.add_argument(
        "input", nargs="+", help="files, folders of files, or Hugging Face datasets, in order"
    )
    sub.add_argument("--output-prefix", required=True, help="PREFIX_KEY_document.bin and .idx")
    sub.add_argument("--tokenizer", required=True, help="a folder or a name of the Hub")
    sub.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to take"
    )
    sub.add_argument("--append-eod", action="store_true", help="end each document with a token")
    sub.add_argument("--eod-token", help="which (the tokenizer's eos token)")
    sub.add_argument(
        "--no-special-tokens",
        action="store_true",
        help="leave out the special tokens that the tokenizer adds to each text",
    )
    sub.add_argument("--split", help="of Hugging Face datasets (train)")
    sub.add_argument(
        "--workers", type=int, default=count_cores(), help="processes (one for each core)"
    )
    sub.add_argument("--overwrite", action="store_true", help="replace files that are there")
    sub.set_defaults(action=_build)


def _build(args: argparse.Namespace) -> tuple[Any, list[str]]:
    from tqdm import tqdm

    from accelerate_megatron.indexed.building import BuildPlan, build
    from accelerate_megatron.indexed.documents import find_parts
    from accelerate_megatron.indexed.tokenizing import plan_tokenizer

    tokenizer = plan_tokenizer(
        args.tokenizer,
        append_eod=args.append_eod,
        eod_token=args.eod_token,
        special=not args.no_special_tokens,
    )
    plan = BuildPlan(
        inputs=tuple(args.input),
        output=args.output_prefix,
        tokenizer=tokenizer,
        keys=tuple(args.json_keys),
        workers=args.workers,
        split=args.split,
    )
    parts = find_parts(plan.inputs, split=plan.split)
    unit = "row" if parts and parts[0].kind in ("parquet", "dataset") else "B"
    total = sum(part.size for part in parts)
    with tqdm(total=total, unit=unit, unit_scale=True, disable=args.json) as bar:
        report = build(plan, overwrite=args.overwrite, on_part=lambda part: bar.update(part.size))
    facts = asdict(report) | {"good": True}
    lines = [
        f"{prefix}.bin, .idx: {report.documents} documents, {report.tokens[key]} tokens of "
        f"{tokenizer.dtype.__name__}"
        + (f", {report.empty[key]} documents without any" if report.empty[key] else "")
        for key, prefix in report.prefixes.items()
    ]
    if report.parts_found:
        lines.append(f"{report.parts_found} of {report.parts} parts were there from before.")
    return facts, lines


def _inspect(args: argparse.Namespace) -> tuple[Any, list[str]]:
    from accelerate_megatron.indexed.merging import inspect, sample_documents
    from accelerate_megatron.indexed.tokenizing import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    contents = inspect(args.prefix, vocab_size=None if tokenizer is None else len(tokenizer))
    index = contents.index
    samples = [
        {"document": number, "tokens": ids, "text": tokenizer and tokenizer.decode(ids)}
        for number, ids in sample_documents(index, args.samples)
    ]
    lengths = index.document_lengths()
    facts = {
        "prefix": args.prefix,
        "good": True,
        "dtype": index.dtype.name,
        "documents": index.num_documents,
        "sequences": len(index.lengths),
        "tokens": index.num_tokens,
        "smallest_id": contents.smallest_id,
        "largest_id": contents.largest_id,
        "shortest": int(lengths.min()) if len(lengths) else None,
        "longest": int(lengths.max()) if len(lengths) else None,
        "mean": float(lengths.mean()) if len(lengths) else None,
        "histogram": contents.histogram,
        "samples": samples,
    }
    return facts, _inspect_lines(facts)


def _inspect_lines(facts: dict[str, Any]) -> list[str]:
    names = ("documents", "sequences", "tokens", "dtype", "smallest_id", "largest_id")
    lines = [f"{name:<12} {facts[name]}" for name in (*names, "shortest", "longest", "mean")]
    lines += ["", "tokens of a document"]
    most = max((count for *_, count in facts["histogram"]), default=0)
    for low, high, count in facts["histogram"]:
        bar = "#" * round(40 * count / most) if most else ""
        lines.append(f"{low:>9} to {high:<9} {count:>10} {bar}")
    for sample in facts["samples"]:
        shown = sample["text"] if sample["text"] is not None else str(sample["tokens"])
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        lines.append(f"\ndocument {sample['document']}: {shown!r}")
    return lines


def _merge(args: argparse.Namespace) -> tuple[Any, list[str]]:
    from accelerate_megatron.indexed.merging import merge

    index = merge(args.prefix, args.output_prefix, overwrite=args.overwrite)
    facts = {
        "prefix": args.output_prefix,
        "good": True,
        "documents": index.num_documents,
        "tokens": index.num_tokens,
        "dtype": index.dtype.name,
    }
    told = f"{index.num_documents} documents, {index.num_tokens} tokens of {index.dtype.name}"
    return facts, [f"{args.output_prefix}.bin, .idx: {told}"]
