"""What each rank of `accelerate-megatron verify` does."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_megatron import Accelerator, engine
from accelerate_megatron.cli.jobs import settings_of_rank, write_report
from accelerate_megatron.cli.model_class import empty_model, load_model
from accelerate_megatron.config.encoder_decoder_rules import refuse_encoder_decoder
from accelerate_megatron.models.registry import family_of

_DEFAULT_LENGTH = 64


def main() -> None:
    """Compute the logits on all ranks, compare them on the last one and write the report."""
    settings = settings_of_rank()
    accelerator = Accelerator()
    empty = empty_model(settings["folder"])
    config = empty.config
    refuse_encoder_decoder(family_of(config).shape(config), "accelerate-megatron verify")
    prepared = accelerator.prepare(empty, weights=settings["folder"])
    prepared.eval()
    session = prepared.session
    tokens = _tokens(settings, session.run, accelerator.device)
    batch = {"input_ids": tokens}
    if session.run.shape.encoder is None:
        logits = engine.model_logits(session.chunks, session.run, tokens)
        ours = None if logits is None else {"logits": logits}
    else:
        batch |= _two_padded_segments(tokens, session.run.shape.encoder.token_types)
        ours = engine.encoder_outputs(session.chunks, session.run, batch)
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        return
    assert ours is not None, "the main process is the last rank, which holds the last stage"
    model = load_model(settings["folder"], config, next(iter(ours.values())).dtype)
    report = compare_outputs(ours, _reference(model, batch))
    layout = session.run.layout
    sizes = {"tp": layout.tp_size, "pp": layout.pp_size, "dp": layout.dp_size}
    write_report(
        settings,
        {
            "folder": settings["folder"],
            "model_type": config.model_type,
            "layout": sizes,
            "vocab_size": session.run.shape.vocab_size,
            "tokens": tokens.tolist(),
            **report,
        },
    )
    accelerator.wait_for_everyone()


def _tokens(settings: dict[str, Any], run: Any, device: torch.device) -> torch.Tensor:
    """Return random tokens, the same on every rank, [rows, length]."""
    rows = -(-settings["rows"] // run.num_micro_batches) * run.num_micro_batches
    length = settings["length"] or min(_DEFAULT_LENGTH, run.shape.max_positions or _DEFAULT_LENGTH)
    generator = torch.Generator().manual_seed(settings["seed"])
    return torch.randint(run.shape.vocab_size, (rows, length), generator=generator).to(device)


def _two_padded_segments(tokens: torch.Tensor, token_types: int) -> dict[str, torch.Tensor]:
    """Return the rest of an encoder's batch: a second segment, and padding in every other row."""
    length = tokens.shape[1]
    places = torch.arange(length, device=tokens.device).expand_as(tokens)
    is_padding = places >= max(1, length - length // 4)
    is_padding = is_padding & (torch.arange(len(tokens), device=tokens.device) % 2 == 1)[:, None]
    types = (places >= length // 2).long() if token_types > 1 else torch.zeros_like(tokens)
    return {"attention_mask": (~is_padding).long(), "token_type_ids": types}


def _reference(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Return the outputs of transformers' own model, on the CPU."""
    model.eval()
    with torch.no_grad():
        return model(**{key: value.cpu() for key, value in batch.items()})


def compare_outputs(ours: dict[str, torch.Tensor], wanted: Any) -> dict[str, Any]:
    """Return how a model's outputs differ from those of transformers.

    Args:
        ours: By transformers' names: logits or hidden states [rows, s, n] first, or the logits
            [rows, n] of whole rows, whose differences count for their first token.
        wanted: An output of transformers with these fields.
    """
    first = next(iter(ours))
    places = ours[first].shape[:-1].numel()
    report: dict[str, Any] = {
        "compared": first,
        "num_values": ours[first].shape[-1],
        "num_places": places,
    }
    for name, value in ours.items():
        pair = value.float().cpu(), getattr(wanted, name).float()
        found = compare(*(output if output.dim() == 3 else output[:, None] for output in pair))
        if name == first:
            report |= found
            continue
        for row, (difference,) in zip(report["differences"], found["differences"], strict=True):
            row[0] = max(row[0], difference)
        report["largest_difference"] = max(
            report["largest_difference"], found["largest_difference"]
        )
    return report


def compare(ours: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    """Return how two models' logits [rows, s, vocabulary] differ.

    `differences` is the largest difference of each token's logits, [rows][s].
    """
    differences = (ours - wanted).abs().amax(dim=-1)
    return {
        "largest_logit": wanted.abs().max().item(),
        "largest_difference": differences.max().item(),
        "same_best": int((ours.argmax(-1) == wanted.argmax(-1)).sum()),
        "differences": differences.tolist(),
    }


if __name__ == "__main__":
    main()
