"""Losses that keep the load of the experts even, exact for every way to cut up a batch.

Megatron-Core computes such losses for each micro-batch on each rank, so that their gradients
depend on the layout; Hugging Face's formula multiplies two sums over all layers and tokens of a
batch. Here an update first runs the model forward without gradients, to count what the routers
do, and adds the counts up over all ranks. Only then it trains: each router knows by then what a
token's scores weigh in the losses of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from accelerate_megatron.config.run import ExpertSettings
from accelerate_megatron.models.experts import Experts


@dataclass
class _Counts:
    """What the routers did with a global batch; sums over its tokens and the layers, fp64."""

    chosen: torch.Tensor
    """How often each expert was chosen, [experts]."""
    scores: torch.Tensor
    """Each expert's scores, [experts]."""
    routed: torch.Tensor
    """Tokens, counted once in each layer; a scalar."""


class LoadBalance:
    """What the routers of this rank's chunks count, and what they then add to the gradients.

    Attributes:
        loss: Hugging Face's load-balancing loss of the last counted batch, times its
            coefficient; the same on every rank. The other losses are in the gradients only.
    """

    def __init__(self, experts: Experts, settings: ExpertSettings, device: torch.device) -> None:
        """Take the coefficients.

        Args:
            experts: The model's experts.
            settings: How they are run.
            device: Where the model computes.
        """
        self.loss = 0.0
        self._experts = experts
        is_by_sequence = settings.load_balancing == "seq_aux_loss"
        self._batch_coefficient = 0.0 if is_by_sequence else experts.balance_coefficient
        self._sequence_coefficient = experts.balance_coefficient if is_by_sequence else 0.0
        self._z_coefficient = settings.z_loss_coefficient
        self._device = device
        self._counts: _Counts | None = None
        self._score_weights: torch.Tensor | None = None
        """What each expert's scores weigh in Hugging Face's loss, [experts]; set after counting."""
        self._num_tokens, self._num_sequences = 1.0, 1.0
        self._total_weight = 1.0

    @property
    def is_active(self) -> bool:
        """Whether the routers are to call `route`."""
        return self._counts is not None or self._score_weights is not None

    @contextmanager
    def counting(self, is_real: torch.Tensor) -> Iterator[None]:
        """Let the routers count inside the block, then add up over all ranks; all call it.

        Args:
            is_real: Bool [rows, s], the tokens of this replica's part of the global batch.
        """
        num_experts = self._experts.num_experts
        sums = torch.zeros(2 * num_experts + 3, dtype=torch.float64, device=self._device)
        chosen, scores = sums[:num_experts], sums[num_experts:-3]
        routed, batch = sums[-3:-2], sums[-2:]
        self._counts = _Counts(chosen, scores, routed)
        try:
            yield
        finally:
            self._counts = None
        batch += torch.stack([is_real.sum(), is_real.any(dim=1).sum()])
        dist.all_reduce(sums)
        # All ranks of a replica have counted its tokens and sequences.
        copies = dist.get_world_size() // parallel_state.get_data_parallel_world_size()
        self._num_tokens, self._num_sequences = (max(n / copies, 1.0) for n in batch.tolist())
        self._weigh(_Counts(chosen, scores, routed.clamp(min=1)))

    def _weigh(self, counts: _Counts) -> None:
        """Set the loss: coefficient x experts x sum of (share of the tokens x mean score).

        Source: transformers 5.24, models/mixtral/modeling_mixtral.py, load_balancing_loss_func.
        """
        factor = self._batch_coefficient * self._experts.num_experts
        weights = factor * counts.chosen / counts.routed / counts.routed
        self._score_weights = weights.float()
        self.loss = float((weights * counts.scores).sum())

    @contextmanager
    def training(self, total_weight: float) -> Iterator[None]:
        """Let the routers add the gradients of the losses inside the block.

        Args:
            total_weight: What the summed gradients will be divided by: the tokens, or the
                micro-batches, that count in the loss of the global batch.
        """
        self._total_weight = total_weight
        try:
            yield
        finally:
            self._score_weights = None

    def route(
        self, logits: torch.Tensor, probs: torch.Tensor, is_padding: torch.Tensor
    ) -> torch.Tensor:
        """Count one micro-batch's tokens in one layer, or attach their losses to `probs`.

        Called by the routers of all ranks that share a sequence, in the same order.

        Args:
            logits: The router's, [s, b, experts]; s is this rank's part of the sequence.
            probs: What the layer goes on with.
            is_padding: Bool [s, b], True where a token is not one of the batch.

        Returns:
            `probs`, through which the losses then get their gradients.
        """
        if self._counts is not None:
            self._count(self._counts, logits, ~is_padding)
        elif self._score_weights is not None and torch.is_grad_enabled():
            loss = self._attached_loss(self._score_weights, logits.float(), ~is_padding)
            attached: torch.Tensor = MoEAuxLossAutoScaler.apply(probs, loss * self._total_weight)
            return attached
        return probs

    def _count(self, counts: _Counts, logits: torch.Tensor, is_real: torch.Tensor) -> None:
        scores, chosen = self._scores(logits.float())
        counts.chosen += chosen[is_real].double().sum(dim=0)
        counts.scores += scores[is_real].double().sum(dim=0)
        counts.routed += is_real.sum()

    def _attached_loss(
        self, score_weights: torch.Tensor, logits: torch.Tensor, is_real: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's part of the losses; the parts of all ranks and layers add up."""
        scores, chosen = self._scores(logits)
        loss = (scores[is_real] * score_weights).sum()
        if self._z_coefficient:
            squares = torch.logsumexp(logits, dim=-1).square()
            loss = loss + self._z_coefficient / self._num_tokens * squares[is_real].sum()
        if self._sequence_coefficient:
            by_sequence = _sequence_losses(scores, chosen, is_real)
            factor = self._sequence_coefficient * self._experts.num_experts
            factor /= self._experts.top_k * self._num_sequences
            loss = loss + factor * by_sequence.sum()
        return loss

    def _scores(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of all experts, which add up to 1, and the top-k map, [s, b, e]."""
        if self._experts.score == "softmax":
            scores = torch.softmax(logits, dim=-1)
        else:
            scores = torch.sigmoid(logits)
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        best = scores.detach().topk(self._experts.top_k, dim=-1).indices
        return scores, torch.zeros_like(scores).scatter(-1, best, 1.0).detach()


def _sequence_losses(
    scores: torch.Tensor, chosen: torch.Tensor, is_real: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of sum over experts of (share of tokens x mean score), [b].

    Communicates with the ranks that hold the other tokens of the same sequences.

    Source: DeepSeek-V3 (2024), section 2.1.2, equations 17 to 20.
    """
    weights = is_real.unsqueeze(-1).to(scores.dtype)
    # [b, experts + 1]: how often each expert was chosen, and the tokens of the sequence.
    totals = torch.cat([(chosen * weights).sum(dim=0), weights.sum(dim=0)], dim=-1)
    dist.all_reduce(totals, group=parallel_state.get_tensor_and_context_parallel_group())
    lengths = totals[:, -1:].clamp(min=1)
    shares = totals[:, :-1] / lengths
    return (shares * (scores * weights).sum(dim=0) / lengths).sum(dim=-1)
