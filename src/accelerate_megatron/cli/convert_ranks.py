"""What each rank of `accelerate-megatron import` and `export` does."""

from __future__ import annotations

import time
from typing import Any

from transformers import AutoTokenizer

from accelerate_megatron import Accelerator
from accelerate_megatron.cli.jobs import settings_of_rank, write_report
from accelerate_megatron.cli.model_class import empty_model, prepare_checkpoint


def main() -> None:
    """Carry out the task of the settings and report it from the main process."""
    settings = settings_of_rank()
    started = time.perf_counter()
    accelerator = Accelerator()
    model = {"import": _import, "export": _export}[settings["task"]](accelerator, settings)
    if accelerator.is_main_process:
        session = model.session
        write_report(
            settings,
            {
                "input": settings.get("folder") or settings["checkpoint"],
                "output": settings["output"],
                "model_type": model.config.model_type,
                "dtype": "bfloat16" if session.run.precision == "bf16" else "float32",
                "num_parameters": model.num_parameters(),
                "seconds": time.perf_counter() - started,
            },
        )
    accelerator.wait_for_everyone()


def _import(accelerator: Accelerator, settings: dict[str, Any]) -> Any:
    prepared = accelerator.prepare(empty_model(settings["folder"]), weights=settings["folder"])
    accelerator.save_state(settings["output"])
    return prepared


def _export(accelerator: Accelerator, settings: dict[str, Any]) -> Any:
    prepared = prepare_checkpoint(accelerator, settings)
    tokenizer = settings["tokenizer"]
    prepared.save_pretrained(
        settings["output"],
        tokenizer=None if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer),
        max_shard_size=settings["max_shard_size"],
        overwrite=settings["overwrite"],
    )
    return prepared


if __name__ == "__main__":
    main()
