"""`accelerate-megatron import HF_DIR --output CKPT`: Hugging Face weights into a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate_megatron.cli.command_line import UsageError
from accelerate_megatron.cli.jobs import (
    PRECISIONS,
    check_model_folder,
    parse_with_launcher_flags,
    run_job,
)
from accelerate_megatron.errors import ConfigurationError

_EXAMPLE = """
A checkpoint can be loaded with any layout; more ranks only make the import faster. All other
flags are those of `accelerate-megatron launch`: --tp_degree, --num_processes, --cpu, ...

example
  accelerate-megatron import ./llama --output ./checkpoint --cpu --tp_degree 2
"""


def main(argv: Sequence[str]) -> int:
    """Write the checkpoint; return 0, 1 when a rank failed, 2 on misuse.

    Args:
        argv: The words after `import`.
    """
    parser = _make_parser()
    args, flags = parse_with_launcher_flags(parser, argv)
    try:
        check_model_folder(args.folder)
        check_output(args.output, overwrite=args.overwrite)
        dtype = args.dtype or dtype_of_config(Path(args.folder))
        report = run_job(
            "accelerate_megatron.cli.convert_ranks",
            {"task": "import", "folder": args.folder, "output": args.output},
            [*flags, "--mixed_precision", PRECISIONS[dtype]],
        )
    except (UsageError, ConfigurationError) as error:
        parser.error(str(error))
    if report is None:
        return 1
    print(json.dumps(report, indent=2) if args.json else describe(report))
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron import",
        usage="accelerate-megatron import HF_DIR --output CKPT [flags]",
        description="Write the weights of a Hugging Face folder into a checkpoint for load_state.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="HF_DIR", help="folder with config and weights")
    parser.add_argument("--output", required=True, metavar="CKPT", help="the checkpoint's folder")
    parser.add_argument(
        "--dtype", choices=PRECISIONS, help="of the weights in the checkpoint (the config's)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what the output folder holds"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def check_output(output: str, *, overwrite: bool) -> None:
    """Refuse an output folder that holds something.

    Raises:
        UsageError: It does, and `overwrite` is off; or it is a file.
    """
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise UsageError(f"--output {output}: it is a file; name a folder.")
    if not overwrite and path.is_dir() and any(path.iterdir()):
        raise UsageError(
            f"--output {output}: the folder is not empty; name another one, or pass --overwrite."
        )


def dtype_of_config(folder: Path) -> str:
    """Return "bfloat16" where the config says so, else "float32"."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Folders of transformers 4 have the older name.
    dtype = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if dtype == "bfloat16" else "float32"


def describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    return (
        f"{report['input']} -> {report['output']}: {report['model_type']}, "
        f"{report['num_parameters']:,} parameters, {report['dtype']}, {report['seconds']:.1f} s"
    )
