"""Balancing the load of experts around a step: the tokens that count, and the counting pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate_megatron import engine
from accelerate_megatron.config.run import RunConfig
from accelerate_megatron.data.checks import RealPart

ROUTED = "routed_tokens"
"""Key under which a batch says which of its tokens are the data's own, bool [rows, s]."""


def routed_tokens(batch: Mapping[str, Any], part: RealPart) -> torch.Tensor:
    """Return which tokens of a batch the balancing losses are over, bool [rows, s].

    Those that Hugging Face's model would see: all that the attention mask keeps, or without a
    mask all of the data's. Filler rows and padding that we added are not among them.

    Args:
        batch: A joined batch with `input_ids` [rows, s].
        part: Which part of it comes from the data.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    routed = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    routed = routed.clone()
    routed[part.num_rows :] = False
    routed[:, part.longest :] = False
    return routed


class BalanceStep:
    """The losses that balance the experts of one model, around its steps."""

    def __init__(
        self,
        run: RunConfig,
        ranks: engine.Ranks,
        chunks: list[torch.nn.Module],
        device: torch.device,
    ) -> None:
        """Connect the routers of `chunks`. Only for runs with `balances_experts`."""
        assert run.shape.experts is not None
        self._balance = engine.LoadBalance(run.shape.experts, run.experts, device)
        engine.balance_routers(chunks, self._balance)
        self._layout = run.layout
        self._ranks = ranks

    @property
    def loss(self) -> float:
        """What is added to the loss of the batch that was counted last."""
        return self._balance.loss

    def counting(self, batch: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a block whose forward passes count the tokens of `batch`; all ranks enter it."""
        return self._balance.counting(batch[ROUTED])

    def training(self, total_weight: float) -> AbstractContextManager[None]:
        """Return a block whose backward passes balance; `total_weight` is the loss's own."""
        return self._balance.training(total_weight)

    def noting(
        self, data_iterator: Iterator[Mapping[str, Any]], chunk: torch.nn.Module
    ) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches for `chunk`, and tell its routers which tokens count."""
        for micro_batch in data_iterator:
            engine.hide_padding(chunk, ~self._own_part(micro_batch[ROUTED]))
            yield {key: value for key, value in micro_batch.items() if key != ROUTED}

    def _own_part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of [b, s], as activations are split over the ranks."""
        ranks, layout = self._ranks, self._layout
        if layout.cp_size > 1:
            tokens = engine.take_slice(tokens, dim=1, rank=ranks.cp_rank, size=ranks.cp_size)
        if layout.sequence_parallel:
            tokens = tokens.chunk(layout.tp_size, dim=1)[ranks.tp_rank]
        return tokens
