"""`accelerate-megatron ckpt`: look into checkpoints without loading or running anything."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_megatron.errors import CheckpointError


def main(argv: Sequence[str]) -> int:
    """Run one of inspect, validate and list; return 0, or 1 when a checkpoint is not good.

    Args:
        argv: The words after `ckpt`.
    """
    args = _parser().parse_args(argv)
    try:
        facts, lines, is_good = args.action(args)
    except CheckpointError as error:
        if args.json:
            print(json.dumps({"good": False, "problems": [str(error)]}, indent=2))
        else:
            print(f"accelerate-megatron ckpt: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=2) if args.json else "\n".join(lines))
    return 0 if is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron ckpt",
        description="Look into checkpoints. Nothing in them is run.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, action, what in (
        ("inspect", _inspect, "show the run, and each tensor's name, shape, dtype and bytes"),
        ("validate", _validate, "compare every file with its checksum, and read the index"),
        ("list", _list, "show the checkpoints in a folder, oldest first"),
    ):
        sub = actions.add_parser(name, help=what, description=what)
        sub.add_argument("folder", type=Path)
        sub.add_argument("--json", action="store_true", help="as JSON")
        sub.set_defaults(action=action, allow_pickle=False)
        if name == "inspect":
            sub.add_argument(
                "--allow-pickle",
                action="store_true",
                help="unpickle the index as torch does, which runs what it says: own files only",
            )
    return parser


def _inspect(args: argparse.Namespace) -> tuple[Any, list[str], bool]:
    from accelerate_megatron.checkpoint.manifest import TENSORS, read_manifest
    from accelerate_megatron.checkpoint.megatron_lm import find_megatron_lm
    from accelerate_megatron.checkpoint.safe import read_metadata

    foreign = find_megatron_lm(args.folder)
    if foreign is not None:
        facts = _megatron_lm_facts(foreign, allow_pickle=args.allow_pickle)
        return facts, _inspect_lines(facts), True
    manifest = read_manifest(args.folder)
    metadata = read_metadata(
        args.folder / manifest.folder / TENSORS, allow_pickle=args.allow_pickle
    )
    facts = {
        "folder": str(args.folder),
        "step": manifest.step,
        "created": _when(manifest.created),
        "has_optimizer": manifest.has_optimizer,
        "bytes": manifest.num_bytes,
        "run": dict(manifest.run),
        "tensors": _tensors(metadata),
    }
    return facts, _inspect_lines(facts), True


def _megatron_lm_facts(folder: Path, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Return what is in the folder of one of Megatron-LM's iterations."""
    from accelerate_megatron.checkpoint.megatron_lm import read_megatron_lm, told_arguments
    from accelerate_megatron.checkpoint.safe import METADATA_NAME

    metadata, common = read_megatron_lm(folder, allow_pickle=allow_pickle)
    tensors = _tensors(metadata)
    shown = {tensor["name"] for tensor in tensors}
    return {
        "folder": str(folder),
        "step": common.get("iteration", 0),
        "created": _when((folder / METADATA_NAME).stat().st_mtime),
        "has_optimizer": any(name.startswith(("optimizer", "chained_")) for name in shown),
        "bytes": _num_bytes(folder),
        "run": {"args": told_arguments(common)},
        "tensors": tensors,
        "objects": sorted(set(metadata.state_dict_metadata) - shown),
    }


def _tensors(metadata: Any) -> list[dict[str, Any]]:
    """Return name, shape, dtype, bytes and number of pieces of each tensor in an index."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return [
        {
            "name": name,
            "shape": list(entry.size),
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "bytes": entry.size.numel() * entry.properties.dtype.itemsize,
            "pieces": len(entry.chunks),
        }
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    ]


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _inspect_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{name:<14} {facts[name]}" for name in ("step", "created", "has_optimizer", "bytes")]
    for name, value in facts["run"].items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        lines.append(f"{name:<14} {value}")
    width = max((len(tensor["name"]) for tensor in facts["tensors"]), default=0)
    lines += ["", f"{'tensor':<{width}}  {'dtype':<9} {'bytes':>12}  shape"]
    lines += [
        f"{t['name']:<{width}}  {t['dtype']:<9} {t['bytes']:>12}  {t['shape']}"
        for t in facts["tensors"]
    ]
    return lines + [f"{name:<{width}}  object" for name in facts.get("objects", [])]


def _validate(args: argparse.Namespace) -> tuple[Any, list[str], bool]:
    from accelerate_megatron.checkpoint.manifest import TENSORS, file_problems, read_manifest
    from accelerate_megatron.checkpoint.megatron_lm import find_megatron_lm
    from accelerate_megatron.checkpoint.safe import load_torch_file, read_metadata

    foreign = find_megatron_lm(args.folder)
    if foreign is not None:
        return _validate_megatron_lm(foreign)
    manifest = read_manifest(args.folder)
    problems = file_problems(args.folder, manifest, sorted(manifest.files))
    if not problems:
        data = args.folder / manifest.folder
        objects = [
            data / name
            for name in manifest.files
            if name.startswith("custom_checkpoint_") or name == f"{TENSORS}/common.pt"
        ]
        try:
            read_metadata(data / TENSORS)
            for path in objects:
                load_torch_file(path)
        except CheckpointError as error:
            problems.append(str(error))
    facts = {
        "folder": str(args.folder),
        "good": not problems,
        "files": len(manifest.files),
        "bytes": manifest.num_bytes,
        "problems": problems,
    }
    told = f"{args.folder}: {len(manifest.files)} files, {manifest.num_bytes} bytes"
    lines = [f"{told}: {'all good' if not problems else 'damaged'}", *problems]
    return facts, lines, not problems


def _validate_megatron_lm(folder: Path) -> tuple[Any, list[str], bool]:
    """Read the small parts, and compare sizes; raises what is wrong."""
    facts = _megatron_lm_facts(folder)
    num_files = sum(path.is_file() for path in folder.iterdir())
    checked = {
        **{name: facts[name] for name in ("folder", "bytes")},
        "good": True,
        "files": num_files,
        "checksums": False,
        "problems": [],
    }
    told = f"{folder}: {num_files} files, {facts['bytes']} bytes"
    return checked, [f"{told}: sizes are good; Megatron-LM keeps no checksums"], True


def _listed_megatron_lm(folder: Path) -> dict[str, Any]:
    """Return one line of a list for one of Megatron-LM's iterations."""
    entry: dict[str, Any] = {"name": folder.name, "problem": None}
    try:
        facts = _megatron_lm_facts(folder)
    except CheckpointError as error:
        return {**entry, "problem": str(error)}
    return entry | {name: facts[name] for name in ("step", "created", "bytes", "has_optimizer")}


def _list(args: argparse.Namespace) -> tuple[Any, list[str], bool]:
    from accelerate_megatron.checkpoint.folders import find_checkpoints, find_unfinished
    from accelerate_megatron.checkpoint.megatron_lm import find_iterations

    if not args.folder.is_dir():
        raise CheckpointError(f"{args.folder}: there is no such folder; name one of checkpoints.")
    found = [
        {
            "name": item.path.name,
            "step": item.manifest.step if item.manifest else None,
            "created": _when(item.manifest.created) if item.manifest else None,
            "bytes": item.manifest.num_bytes if item.manifest else None,
            "has_optimizer": item.manifest.has_optimizer if item.manifest else None,
            "problem": item.problem or None,
        }
        for item in find_checkpoints(args.folder)
    ]
    found += [_listed_megatron_lm(folder) for folder in find_iterations(args.folder)]
    unfinished = [path.name for path in find_unfinished(args.folder)]
    lines = [
        f"{entry['name']:<24} step {entry['step']}  {entry['created']}  {entry['bytes']} bytes"
        + ("" if entry["has_optimizer"] else "  weights only")
        if entry["problem"] is None
        else f"{entry['name']:<24} {entry['problem']}"
        for entry in found
    ]
    lines += [f"{name:<24} interrupted, not complete" for name in unfinished]
    facts = {"folder": str(args.folder), "checkpoints": found, "unfinished": unfinished}
    return facts, lines or [f"{args.folder} holds no checkpoints."], True


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
