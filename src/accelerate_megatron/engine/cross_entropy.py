"""Cross entropy over a vocabulary that is split over tensor-parallel ranks and padded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_TOGETHER = {"cpu": 2**18, "cuda": 2**26}
"""By device, about how many logits are in fp32 at once: 1 MB for a CPU's cache, 256 MB."""


def vocabulary_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, vocab_size: int, tp_group: dist.ProcessGroup
) -> torch.Tensor:
    """Return -log softmax(logits)[label] per token, in fp32, shaped like `labels`.

    The softmax runs over the `vocab_size` real tokens: logits of padded rows take no part
    and get no gradient. Called by every rank of `tp_group` with the same labels. Keeps the
    logits for the backward pass, in their own dtype, and one fp32 number per token.

    Args:
        logits: This rank's columns, [..., padded vocabulary / tp], of any float dtype.
        labels: Token ids, [...], each in [0, vocab_size).
        vocab_size: Tokens of the whole vocabulary, without padding.
        tp_group: The ranks that hold the other columns, in order.
    """
    loss: torch.Tensor = _VocabularyCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), labels.flatten(), vocab_size, tp_group
    )
    return loss.view(labels.shape)


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, *, vocab_size: int, tp_group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the loss per token, fp32 [b, s], of Megatron's logits.

    Args:
        logits: This rank's columns, [s, b, padded vocabulary / tp].
        labels: Token ids, [b, s].
        vocab_size: Tokens of the whole vocabulary, without padding.
        tp_group: The ranks that hold the other columns, in order.
    """
    loss = vocabulary_cross_entropy(
        logits, labels.transpose(0, 1), vocab_size=vocab_size, tp_group=tp_group
    )
    # Contiguous, since users' loss functions flatten it with view(-1).
    return loss.transpose(0, 1).contiguous()


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Of logits [tokens, columns] and labels [tokens], a few tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        tp_group: dist.ProcessGroup,
    ) -> torch.Tensor:
        tokens, columns = logits.shape
        first = dist.get_rank(tp_group) * columns
        num_real = min(max(vocab_size - first, 0), columns)
        is_mine = (labels >= first) & (labels < first + num_real)
        index = (labels - first).clamp(0, max(num_real - 1, 0)).unsqueeze(-1)

        largest = torch.full(
            (tokens,), torch.finfo(torch.float32).min, dtype=torch.float32, device=logits.device
        )
        total, target = torch.zeros_like(largest), torch.zeros_like(largest)
        for part in _parts(logits, num_real):
            real = logits[part, :num_real]
            target[part] = real.gather(-1, index[part]).squeeze(-1).float()
            largest[part] = real.amax(dim=-1).float()
            # fp32, whatever the logits are: of two tensors the wider dtype counts.
            total[part] = (real - largest[part].unsqueeze(-1)).exp_().sum(dim=-1)
        target.masked_fill_(~is_mine, 0.0)
        if tp_group.size() > 1:
            largest, total, target = _over_ranks(largest, total, target, tp_group)

        ctx.save_for_backward(logits, largest + total.log(), index, is_mine)
        ctx.num_real = num_real
        return total.log() - (target - largest)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum, index, is_mine = ctx.saved_tensors
        (grad_loss,) = grad_outputs
        num_real = ctx.num_real
        at_label = -is_mine.float().unsqueeze(-1)
        grad = torch.empty_like(logits)
        grad[:, num_real:] = 0
        for part in _parts(logits, num_real):
            softmax = (logits[part, :num_real] - log_sum[part].unsqueeze(-1)).exp_()
            softmax.scatter_add_(-1, index[part], at_label[part])
            grad[part, :num_real] = softmax.mul_(grad_loss[part].unsqueeze(-1))
        return grad, None, None, None


def _parts(logits: torch.Tensor, num_real: int) -> Iterator[slice]:
    """Yield the tokens that are computed together; nothing where a rank has padding alone.

    In fp32 there are never more logits than these, which stay in the caches of a CPU.
    """
    if num_real == 0:
        return
    tokens = max(1, _TOGETHER[logits.device.type] // num_real)
    for start in range(0, logits.shape[0], tokens):
        yield slice(start, start + tokens)


def _over_ranks(
    largest: torch.Tensor, total: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest logit, the sum of exp(logit - largest) and the label's logit, of all."""
    everywhere = largest.clone()
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=group)
    # One collective for both sums.
    sums = torch.stack([total * (largest - everywhere).exp(), target])
    dist.all_reduce(sums, group=group)
    return everywhere, sums[0], sums[1]
