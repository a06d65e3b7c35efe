"""`accelerate-megatron generate CKPT_OR_HF_DIR --prompt TEXT`: continue text with a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate_megatron.cli.command_line import UsageError
from accelerate_megatron.cli.export import checkpoint_configs
from accelerate_megatron.cli.import_ import dtype_of_config
from accelerate_megatron.cli.jobs import PRECISIONS, parse_with_launcher_flags, run_job
from accelerate_megatron.errors import CheckpointError, ConfigurationError, GenerationError
from accelerate_megatron.generation.settings import ModelTokens, resolve_settings

_EXAMPLE = """
Takes the likeliest token each time, unless --temperature, --top_k or --top_p asks for sampling or
--num_beams for beams. All other flags are those of `accelerate-megatron launch`: --tp_degree,
--num_processes, --cpu, ...

example: on four CPU ranks
  accelerate-megatron generate ./llama --prompt "def main():" --top_p 0.9 --cpu \\
      --num_processes 4 --tp_degree 2 --pp_degree 2
"""

_SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "top_p_decay",
    "top_p_bound",
    "num_beams",
    "length_penalty",
    "seed",
    "add_BOS",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def main(argv: Sequence[str]) -> int:
    """Print each prompt and its continuation; return 0, 1 when a rank failed, 2 on misuse.

    Args:
        argv: The words after `generate`.
    """
    parser = _make_parser()
    args, flags = parse_with_launcher_flags(parser, argv)
    asked = {name: value for name in _SETTINGS if (value := getattr(args, name)) is not None}
    try:
        source = _find_model(Path(args.folder))
        _check_settings(asked, Path(source["configs"]))
        dtype = args.dtype or source["dtype"]
        settings = {
            **source,
            "tokenizer": _find_tokenizer(args.tokenizer, source),
            "prompts": args.prompt,
            "asked": asked,
            "streams": not args.json and asked.get("num_beams", 1) == 1,
        }
        report = run_job(
            "accelerate_megatron.cli.generate_ranks",
            settings,
            [*flags, "--mixed_precision", PRECISIONS[dtype]],
        )
    except (UsageError, ConfigurationError, CheckpointError, GenerationError) as error:
        parser.error(str(error))
    if report is None:
        return 1
    if args.json:
        print(json.dumps(report, indent=2))
    elif not settings["streams"]:
        print("\n\n".join(row["text"] for row in report["generated"]))
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-megatron generate",
        usage="accelerate-megatron generate CKPT_OR_HF_DIR --prompt TEXT [flags]",
        description="Continue text with the model of a checkpoint or a Hugging Face folder.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", metavar="CKPT_OR_HF_DIR", help="a checkpoint, or folder with config and weights")
    add("--prompt", action="append", required=True, metavar="TEXT", help="may be repeated")
    add("--max_new_tokens", type=int, default=64, metavar="N", help="tokens to add (64)")
    add("--temperature", type=float, metavar="X", help="divides the logits; above 0")
    add("--top_k", type=int, metavar="N", help="draw from so many likeliest tokens")
    add("--top_p", type=float, metavar="X", help="draw from those that reach this probability")
    add("--top_p_decay", type=float, metavar="X", help="multiplies --top_p after each token")
    add("--top_p_bound", type=float, metavar="X", help="what --top_p does not fall below")
    add("--num_beams", type=int, metavar="N", help="beams; the text comes at the end")
    add("--length_penalty", type=float, metavar="X", help="power of a beam's length (1.0)")
    add("--seed", type=int, metavar="N", help="of the sampling")
    add("--add_BOS", action="store_true", default=None, help="begin with the model's first token")
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (that of the model)")
    add("--dtype", choices=PRECISIONS, help="to compute in (the model's)")
    add("--json", action="store_true", help="as JSON, at the end")
    return parser


def _find_model(folder: Path) -> dict[str, Any]:
    """Return where configs and weights are, and the dtype.

    Raises:
        UsageError: The folder holds no model.
    """
    if (folder / "config.json").is_file():
        return {"configs": str(folder), "checkpoint": None, "dtype": dtype_of_config(folder)}
    run, configs, dtype = checkpoint_configs(folder)
    return {
        "configs": str(configs),
        "checkpoint": str(folder),
        "tied": run["model"]["tied_embeddings"],
        "dtype": dtype,
    }


def _find_tokenizer(given: str | None, source: dict[str, Any]) -> str:
    """Return the folder of the tokenizer.

    Raises:
        UsageError: There is none.
    """
    folder = given or source["configs"]
    if any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        return str(folder)
    raise UsageError(f"{folder} holds no tokenizer; name its folder with --tokenizer DIR.")


def _check_settings(asked: dict[str, Any], configs: Path) -> None:
    """Refuse settings here, before ranks are started.

    Raises:
        GenerationError: One does not fit.
    """
    known = [
        SimpleNamespace(**json.loads(path.read_text(encoding="utf-8")))
        for name in ("generation_config.json", "config.json")
        if (path := configs / name).is_file()
    ]
    config = known[-1]
    has_encoder = getattr(config, "is_encoder_decoder", False)
    resolve_settings(asked, ModelTokens.of(known, config.vocab_size, has_encoder=has_encoder))
