"""Prompts of different lengths as one batch that ends at one place, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelerate_megatron.errors import GenerationError
from accelerate_megatron.generation.settings import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of one data-parallel rank, padded on the left."""

    tokens: torch.Tensor
    """int64 [b, s]."""
    lengths: torch.Tensor
    """int64 [b], without padding."""
    padded_right: bool
    """Whether the prompts came, and the results go, with the padding on the right."""
    max_new_tokens: int

    def answers(self, start_token_id: int) -> Prompts:
        """Return the rows that a decoder begins where an encoder reads these prompts."""
        return Prompts(
            tokens=torch.full_like(self.tokens[:, :1], start_token_id),
            lengths=torch.ones_like(self.lengths),
            padded_right=False,
            max_new_tokens=self.max_new_tokens,
        )

    @property
    def is_padding(self) -> torch.Tensor:
        """Bool [b, s], True before a row's first token."""
        width = self.tokens.shape[1]
        places = torch.arange(width, device=self.tokens.device)
        return places < (width - self.lengths).unsqueeze(1)

    def as_given(self, tokens: torch.Tensor, pad_token_id: int) -> torch.Tensor:
        """Move the rows of `tokens` [b, s + new] to where the padding came from."""
        if not self.padded_right:
            return tokens
        width = tokens.shape[1]
        places = torch.arange(width, device=tokens.device)
        first = (self.tokens.shape[1] - self.lengths).unsqueeze(1)
        moved = tokens.gather(1, (places + first).clamp(max=width - 1))
        return moved.masked_fill(places >= width - first, pad_token_id)


def read_prompts(
    input_ids: Any, attention_mask: Any, settings: GenerationSettings, *, max_positions: int
) -> Prompts:
    """Return checked prompts.

    Args:
        input_ids: int [b, s].
        attention_mask: [b, s], 1 for a prompt's tokens, 0 for padding on one side; None: all
            tokens are a prompt's.
        settings: How to continue them.
        max_positions: Tokens that the model can count.

    Raises:
        GenerationError: They are no prompts, or too long.
    """
    ids = _checked_ids(input_ids, settings)
    is_token = _checked_mask(ids, attention_mask)
    lengths = is_token.sum(dim=1)
    starts_with_token, ends_with_token = bool(is_token[:, 0].all()), bool(is_token[:, -1].all())
    if not (starts_with_token or ends_with_token):
        raise GenerationError(
            "attention_mask pads some prompts on the left and others on the right; pad all on one "
            "side."
        )
    padded_right = starts_with_token and not ends_with_token
    tokens = _to_the_end(ids, lengths, padded_right)
    if settings.bos_token_id is not None:
        tokens = torch.cat([torch.full_like(tokens[:, :1], settings.pad_token_id), tokens], dim=1)
        lengths = lengths + 1
        tokens.scatter_(1, (tokens.shape[1] - lengths).unsqueeze(1), settings.bos_token_id)
    if settings.decoder_start_token_id is None:
        new = _new_tokens(tokens.shape[1], int(lengths.max()), settings, max_positions)
    else:
        new = _new_tokens(1, 1, settings, max_positions)
    return Prompts(tokens=tokens, lengths=lengths, padded_right=padded_right, max_new_tokens=new)


def _checked_ids(input_ids: Any, settings: GenerationSettings) -> torch.Tensor:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        what = f"of shape {list(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else ""
        raise GenerationError(
            f"input_ids is a {type(input_ids).__name__} {what}".rstrip()
            + "; it must be a tensor [prompts, tokens]."
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise GenerationError(f"input_ids is {input_ids.dtype}; it must be int64 or int32.")
    rows, width = input_ids.shape
    if rows == 0:
        raise GenerationError("input_ids has no rows; give at least one prompt.")
    if width == 0 and settings.bos_token_id is None:
        raise GenerationError(
            "The prompts are empty; a prompt has at least one token. add_BOS=True begins with the "
            "model's own."
        )
    return input_ids.long()


def _checked_mask(ids: torch.Tensor, attention_mask: Any) -> torch.Tensor:
    if attention_mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape:
        given = list(getattr(attention_mask, "shape", [])) or type(attention_mask).__name__
        raise GenerationError(
            f"attention_mask is {given} for input_ids of {list(ids.shape)}; it must be a tensor of "
            "the same shape."
        )
    is_token = attention_mask.to(ids.device).bool()
    empty = (~is_token.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise GenerationError(
            f"The attention_mask of prompt {empty[0]} hides all of its tokens: an empty prompt. "
            "Drop it, or let it begin with a token."
        )
    changes = (is_token[:, 1:] != is_token[:, :-1]).sum(dim=1)
    has_holes = (changes > 1) | ((changes == 1) & is_token[:, 0] & is_token[:, -1])
    if has_holes.any():
        row = int(has_holes.nonzero()[0])
        raise GenerationError(
            f"The attention_mask of prompt {row} hides tokens in between, or on both sides; "
            "padding has to be on one side."
        )
    return is_token


def check_tokens(ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        GenerationError: There is one.
    """
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        raise GenerationError(
            f"input_ids holds token {int(ids[wrong][0])}; the model's are 0 to {vocab_size - 1}."
        )


def _to_the_end(tokens: torch.Tensor, lengths: torch.Tensor, padded_right: bool) -> torch.Tensor:
    """Move padding from the right to the left."""
    if not padded_right:
        return tokens
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device)
    return tokens.gather(1, (places - (width - lengths).unsqueeze(1)) % width)


def _new_tokens(width: int, longest: int, settings: GenerationSettings, max_positions: int) -> int:
    """Return how many tokens to add, and refuse lengths that do not fit.

    Args:
        width: Of the padded rows that are continued.
        longest: Tokens of the longest of them.
        settings: How to continue them.
        max_positions: Tokens that the model can count.
    """
    new, whole = settings.max_new_tokens, settings.max_length
    have = f"the prompts have {width} tokens"
    if settings.decoder_start_token_id is not None:
        have = f"the decoder's rows begin with token {settings.decoder_start_token_id}"
    if whole is not None:
        if whole <= width:
            raise GenerationError(
                f"max_length is {whole}, but {have}; it counts what there is, padding and BOS "
                f"included, so it must be above {width}. Or give max_new_tokens."
            )
        if new is not None and whole != width + new:
            raise GenerationError(
                f"max_length is {whole} and max_new_tokens {new}, but {have}: {width} + {new} is "
                f"{width + new}. Give one of the two."
            )
        new = whole - width
    assert new is not None, "resolve_settings refuses calls without a length"
    if longest + new > max_positions:
        raise GenerationError(
            f"A prompt of {longest} tokens and {new} new ones are {longest + new}; the model has "
            f"{max_positions} positions. Generate at most {max(max_positions - longest, 0)}, or "
            "shorten the prompt."
        )
    return new
