"""`accelerate-megatron export CKPT --output HF_DIR`: a checkpoint into a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate_megatron.checkpoint.capture import HF_FOLDER
from accelerate_megatron.checkpoint.manifest import read_manifest
from accelerate_megatron.cli.command_line import UsageError
from accelerate_megatron.cli.import_ import check_output, describe
from accelerate_megatron.cli.jobs import PRECISIONS, parse_with_launcher_flags, run_job
from accelerate_megatron.errors import CheckpointError, ConfigurationError

_EXAMPLE = """
Any number of ranks reads a checkpoint of any layout. All other flags are those of
`accelerate-megatron launch`: --tp_degree, --num_processes, --cpu, ...

example
  accelerate-megatron export ./checkpoint --output ./llama --cpu --dtype float32
"""


def main(argv: Sequence[str]) -> int:
    """Write the folder; return 0, 1 when a rank failed, 2 on misuse.

    Args:
        argv: The words after `export`.
    """
    parser = _make_parser()
    args, flags = parse_with_launcher_flags(parser, argv)
    try:
        check_output(args.output, overwrite=args.overwrite)
        run, configs, dtype = checkpoint_configs(Path(args.checkpoint))
        report = run_job(
            "accelerate_megatron.cli.convert_ranks",
            {
                "task": "export",
                "checkpoint": args.checkpoint,
                "configs": str(configs),
                "tied": run["model"]["tied_embeddings"],
                "output": args.output,
                "tokenizer": args.tokenizer,
                "max_shard_size": args.max_shard_size,
                "overwrite": args.overwrite,
            },
            [*flags, "--mixed_precision", PRECISIONS[args.dtype or dtype]],
        )
    except (UsageError, ConfigurationError, CheckpointError) as error:
        parser.error(str(error))
    if report is None:
        return 1
    print(json.dumps(report, indent=2) if args.json else describe(report))
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron export",
        usage="accelerate-megatron export CKPT --output HF_DIR [flags]",
        description="Write a checkpoint of save_state as a folder that transformers loads.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="the checkpoint's folder")
    parser.add_argument("--output", required=True, metavar="HF_DIR", help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=PRECISIONS,
        help="of the weights; float32 gives the optimizer's copies (the run's)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest weights file (5GB)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of a tokenizer to save along")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model in the output folder"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def checkpoint_configs(checkpoint: Path) -> tuple[Mapping[str, Any], Path, str]:
    """Return what a checkpoint says of its run, the folder of its configs, and its dtype.

    Raises:
        CheckpointError: It is no good checkpoint.
        UsageError: It holds no configs.
    """
    manifest = read_manifest(checkpoint.absolute())
    configs = checkpoint / manifest.folder / HF_FOLDER
    if not (configs / "config.json").is_file():
        raise UsageError(f"{checkpoint} holds no Hugging Face config ({HF_FOLDER}).")
    return manifest.run, configs, "bfloat16" if manifest.run["precision"] == "bf16" else "float32"
