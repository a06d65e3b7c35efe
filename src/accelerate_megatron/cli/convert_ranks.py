"""What each rank of `accelerate-megatron import` and `export` does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from accelerate_megatron import Accelerator
from accelerate_megatron.cli.jobs import settings_of_rank, write_report
from accelerate_megatron.cli.model_class import empty_model


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
    prepared = accelerator.prepare(_empty(settings["folder"]), weights=settings["folder"])
    accelerator.save_state(settings["output"])
    return prepared


def _export(accelerator: Accelerator, settings: dict[str, Any]) -> Any:
    model = _empty(settings["configs"])
    # What transformers makes every T5's config say is not what the checkpoint holds.
    said, model.config.tie_word_embeddings = model.config.tie_word_embeddings, settings["tied"]
    prepared = accelerator.prepare(model)
    prepared.config.tie_word_embeddings = said
    accelerator.load_state(settings["checkpoint"])
    tokenizer = settings["tokenizer"]
    prepared.save_pretrained(
        settings["output"],
        tokenizer=None if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer),
        max_shard_size=settings["max_shard_size"],
        overwrite=settings["overwrite"],
    )
    return prepared


def _empty(folder: str) -> Any:
    """Return the model of a config on the meta device, with the generation config beside it."""
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = empty_model(config)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


if __name__ == "__main__":
    main()
