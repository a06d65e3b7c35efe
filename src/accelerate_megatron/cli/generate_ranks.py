"""What each rank of `accelerate-megatron generate` does."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoTokenizer, TextStreamer

from accelerate_megatron import Accelerator
from accelerate_megatron.cli.jobs import settings_of_rank, write_report
from accelerate_megatron.cli.model_class import empty_model, prepare_checkpoint


def main() -> None:
    """Continue the prompts one after another; the main process prints or reports them."""
    settings = settings_of_rank()
    accelerator = Accelerator()
    model = _load(accelerator, settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    rows = [
        _continue(model, tokenizer, prompt, accelerator, settings) for prompt in settings["prompts"]
    ]
    if accelerator.is_main_process:
        write_report(settings, {"generated": rows})
    accelerator.wait_for_everyone()


def _load(accelerator: Accelerator, settings: dict[str, Any]) -> Any:
    if settings["checkpoint"] is not None:
        return prepare_checkpoint(accelerator, settings)
    return accelerator.prepare(empty_model(settings["configs"]), weights=settings["configs"])


def _continue(
    model: Any, tokenizer: Any, prompt: str, accelerator: Accelerator, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the prompt with its continuation, and how long it took."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64)
    streamer = None
    if settings["streams"] and accelerator.is_main_process:
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    started = time.perf_counter()
    tokens = model.megatron_generate(ids, streamer=streamer, **settings["asked"])[0]
    seconds = time.perf_counter() - started
    return {
        "prompt": prompt,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens.tolist(),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
