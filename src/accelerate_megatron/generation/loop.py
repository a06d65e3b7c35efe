"""Token after token, on all ranks of a replica.

The last stage chooses, and one rank of it tells the others: the same tokens on every rank, by
construction.
"""

from __future__ import annotations

import torch

from accelerate_megatron import engine
from accelerate_megatron.generation.beams import BeamSearch
from accelerate_megatron.generation.pace import Pace
from accelerate_megatron.generation.prompts import Prompts
from accelerate_megatron.generation.sampling import SamplingRule, draw, probabilities
from accelerate_megatron.generation.settings import GenerationSettings


class TokenChoice:
    """Chooses the next token of each row."""

    def __init__(self, settings: GenerationSettings, uniforms: torch.Tensor | None) -> None:
        """Take the settings, and the numbers [b, steps] that tokens are drawn with, if they are."""
        self._settings = settings
        self._uniforms = uniforms

    def choose(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Return a token for each row, int64 [b], from logits [b, vocabulary]."""
        settings = self._settings
        logits = logits[:, : settings.vocab_size]
        if self._uniforms is None:
            return logits.argmax(dim=-1)
        top_p = max(settings.top_p * settings.top_p_decay**step, settings.top_p_bound)
        rule = SamplingRule(temperature=settings.temperature, top_k=settings.top_k, top_p=top_p)
        return draw(probabilities(logits, rule), self._uniforms[:, step])


def continue_rows(
    decoder: engine.Decoder,
    prompts: Prompts,
    settings: GenerationSettings,
    choice: TokenChoice,
    pace: Pace,
) -> torch.Tensor:
    """Return the prompts with their new tokens, int64 [b, s + new]. Every rank calls it.

    It ends early when every row has met an end token; after its end a row has padding.

    Args:
        decoder: The model.
        prompts: This replica's prompts.
        settings: How to continue them.
        choice: How tokens are chosen.
        pace: Is given each step's tokens, [b], as they come, and says when to end.
    """
    rows, width = prompts.tokens.shape
    tokens = torch.nn.functional.pad(
        prompts.tokens, (0, prompts.max_new_tokens), value=settings.pad_token_id
    )
    eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=tokens.device)
    has_ended = torch.zeros(rows, dtype=torch.bool, device=tokens.device)
    places = _Positions(prompts)
    with decoder.reading(width + prompts.max_new_tokens, places.padding):
        logits = decoder.read(prompts.tokens, places.of_prompts())
        for step in range(prompts.max_new_tokens):
            if step > 0:
                logits = decoder.read(tokens[:, width - 1 : width], places.of_new(step - 1))
            chosen = tokens[:, 0].clone() if logits is None else choice.choose(logits, step)
            chosen = decoder.announce(chosen)
            if len(eos):
                chosen = chosen.masked_fill(has_ended, settings.pad_token_id)
                has_ended |= torch.isin(chosen, eos)
            tokens[:, width] = chosen
            width += 1
            pace.put(chosen)
            if pace.is_over(len(eos) > 0 and bool(has_ended.all())):
                break
    return tokens[:, :width]


def search_beams(
    decoder: engine.Decoder,
    prompts: Prompts,
    settings: GenerationSettings,
    pace: Pace,
    *,
    is_source: bool,
) -> torch.Tensor:
    """Return the prompts with their best beams, int64 [b, s + new]. Every rank calls it.

    Args:
        decoder: The model.
        prompts: This replica's prompts.
        settings: How to continue them.
        pace: Says when to end.
        is_source: Whether this rank searches and tells the others.
    """
    rows, width = prompts.tokens.shape
    beams, new, device = settings.num_beams, prompts.max_new_tokens, prompts.tokens.device
    search = BeamSearch(rows, settings, new, device) if is_source else None
    places = _Positions(prompts)
    with decoder.reading(width + new, places.padding):
        logits = decoder.read(prompts.tokens, places.of_prompts())
        logits = None if logits is None else logits.repeat_interleave(beams, dim=0)
        decoder.select_rows(torch.arange(rows, device=device).repeat_interleave(beams))
        places.repeat(beams)
        is_over = False
        message = torch.zeros(2 * rows * beams + 1, dtype=torch.int64, device=device)
        for step in range(new):
            if step > 0:
                decoder.select_rows(message[rows * beams : -1])
                logits = decoder.read(message[: rows * beams, None], places.of_new(step - 1))
            if not is_over:
                if search is not None:
                    assert logits is not None
                    tokens, parents, ended = search.advance(logits[:, : settings.vocab_size])
                    message = torch.cat([tokens, parents, tokens.new_tensor([ended])])
                message = decoder.announce(message)
                is_over = bool(message[-1])
            if pace.is_over(is_over):
                break
    found = torch.zeros(rows, new + 1, dtype=torch.int64, device=device)
    if search is not None:
        best, lengths = search.best()
        found = torch.cat([best, lengths.unsqueeze(1)], dim=1)
    found = decoder.announce(found.contiguous())
    return torch.cat([prompts.tokens, found[:, : int(found[:, -1].max())]], dim=1)


class _Positions:
    """Positions of a batch's tokens, counted in each row from its first token."""

    def __init__(self, prompts: Prompts) -> None:
        is_padding = prompts.is_padding
        self.padding = is_padding if bool(is_padding.any()) else None
        """Bool [b, s], or None where no row has any."""
        self._width = prompts.tokens.shape[1]
        # One row for all where all are alike, which is less to compute.
        self._lengths = prompts.lengths if self.padding is not None else prompts.lengths[:1]

    def of_prompts(self) -> torch.Tensor:
        """Return [b or 1, s]; 0 for padding."""
        places = torch.arange(self._width, device=self._lengths.device)
        return (places - (self._width - self._lengths).unsqueeze(1)).clamp(min=0)

    def of_new(self, index: int) -> torch.Tensor:
        """Return those of the new tokens of one step, [b or 1, 1]."""
        return (self._lengths + index).unsqueeze(1)

    def repeat(self, beams: int) -> None:
        """Let each row be `beams` rows."""
        if self.padding is not None:
            self._lengths = self._lengths.repeat_interleave(beams)
