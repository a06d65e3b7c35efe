"""Beam search as transformers' `generate` does it, over the new tokens of several prompts.

Scores are sums of log-probabilities. Candidates that end are kept with their score over their
length to the power of `length_penalty`; the others run on. No entry is ever without a score: what
must not be chosen gets one so low that any real one is above it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerate_megatron.generation.settings import GenerationSettings

_NEVER = -1e9


@dataclass
class _Beams:
    """Sequences of each prompt, best first.

    Attributes:
        tokens: int64 [prompts, beams, max_new_tokens], filled up with padding.
        scores: fp32 [prompts, beams].
        lengths: int64 [prompts, beams], new tokens.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    lengths: torch.Tensor

    def pick(self, index: torch.Tensor) -> _Beams:
        """Return the beams [prompts, new beams] that `index` names."""
        return _Beams(
            self.tokens.take_along_dim(index.unsqueeze(-1), dim=1),
            self.scores.take_along_dim(index, dim=1),
            self.lengths.take_along_dim(index, dim=1),
        )


class BeamSearch:
    """The state of the search; only one rank of a replica has one."""

    def __init__(
        self,
        num_prompts: int,
        settings: GenerationSettings,
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        """Begin with one beam for each prompt; the others get their tokens from it."""
        size = (num_prompts, settings.num_beams)
        self._settings = settings
        self._max_new_tokens = max_new_tokens
        self._eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=device)
        tokens = torch.full((*size, max_new_tokens), settings.pad_token_id, device=device)
        scores = torch.full(size, _NEVER, device=device)
        lengths = torch.zeros(size, dtype=torch.int64, device=device)
        self._kept = _Beams(tokens, scores, lengths)
        self._has_ended = torch.zeros(size, dtype=torch.bool, device=device)
        self._running = _Beams(tokens.clone(), scores.clone(), lengths.clone())
        self._running.scores[:, 0] = 0.0
        self._can_improve = torch.ones(num_prompts, 1, dtype=torch.bool, device=device)
        self._length = 0

    def advance(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Choose the beams that run on.

        Args:
            logits: After each beam's last token, [prompts x beams, vocabulary].

        Returns:
            The next token of each beam and the beam that it continues, both int64
            [prompts x beams], beams counted over all prompts; and whether the search is over.
        """
        candidates, parents = self._candidates(logits)
        self._length += 1
        token = candidates.tokens[:, :, self._length - 1]
        ends = torch.isin(token, self._eos)
        if self._length == self._max_new_tokens:
            ends = torch.ones_like(ends)
        self._keep(candidates, ends)
        candidates.scores = candidates.scores + ends * _NEVER
        best = candidates.scores.topk(self._settings.num_beams).indices
        self._running = candidates.pick(best)
        is_over = self._is_over() or bool(ends.all())
        return (
            token.take_along_dim(best, dim=1).flatten(),
            parents.take_along_dim(best, dim=1).flatten(),
            is_over,
        )

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each prompt's best sequence [prompts, max_new_tokens] and its length."""
        return self._kept.tokens[:, 0], self._kept.lengths[:, 0]

    def _candidates(self, logits: torch.Tensor) -> tuple[_Beams, torch.Tensor]:
        """Return the best continuations of the running beams, and what they continue.

        As many as leave enough that run on when the best ones end.
        """
        num_prompts, num_beams = self._running.scores.shape
        log_probs = logits.float().log_softmax(dim=-1).view(num_prompts, num_beams, -1)
        scores = (log_probs + self._running.scores.unsqueeze(-1)).flatten(1)
        vocabulary = log_probs.shape[-1]
        count = min(max(2, 1 + len(self._eos)) * num_beams, scores.shape[1])
        best, index = scores.topk(count)
        beam = index // vocabulary
        candidates = self._running.pick(beam)
        candidates.scores = best
        candidates.tokens[:, :, self._length] = index % vocabulary
        candidates.lengths = candidates.lengths + 1
        first_beams = torch.arange(num_prompts, device=beam.device).unsqueeze(1) * num_beams
        return candidates, beam + first_beams

    def _keep(self, candidates: _Beams, ends: torch.Tensor) -> None:
        """Take those of the best candidates that end among the kept, where they are better."""
        num_beams = self._settings.num_beams
        ends = ends.clone()
        ends[:, num_beams:] = False  # the rest is there to run on only
        scores = candidates.scores / self._length**self._settings.length_penalty
        is_closed = ~self._can_improve
        if self._settings.early_stopping is True:
            is_closed = is_closed | self._has_ended.all(dim=1, keepdim=True)
        scores = scores + is_closed * _NEVER + ~ends * _NEVER
        both = _Beams(
            torch.cat([self._kept.tokens, candidates.tokens], dim=1),
            torch.cat([self._kept.scores, scores], dim=1),
            torch.cat([self._kept.lengths, candidates.lengths], dim=1),
        )
        best = both.scores.topk(num_beams).indices
        self._kept = both.pick(best)
        self._has_ended = torch.cat([self._has_ended, ends], dim=1).take_along_dim(best, dim=1)

    def _is_over(self) -> bool:
        """Say whether no prompt's running beams can or need be better than what is kept."""
        settings = self._settings
        length = self._length
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = self._max_new_tokens
        possible = self._running.scores[:, :1] / length**settings.length_penalty
        worst = self._kept.scores.min(dim=1, keepdim=True).values
        reached = torch.where(self._has_ended, worst, _NEVER)
        self._can_improve &= (possible > reached).any(dim=1, keepdim=True)
        has_enough = settings.early_stopping is True and bool(self._has_ended.all())
        return has_enough or not bool(self._can_improve.any())
