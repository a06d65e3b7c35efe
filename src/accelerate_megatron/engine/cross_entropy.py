"""Cross entropy over a vocabulary that is split over tensor-parallel ranks and padded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
        logits, labels, vocab_size, tp_group
    )
    return loss


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
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        tp_group: dist.ProcessGroup,
    ) -> torch.Tensor:
        columns = logits.shape[-1]
        first = dist.get_rank(tp_group) * columns
        num_real = min(max(vocab_size - first, 0), columns)
        real = logits[..., :num_real].float()

        largest = (
            real.amax(dim=-1)
            if num_real
            else real.new_full(labels.shape, torch.finfo(real.dtype).min)
        )
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
        shifted = real - largest.unsqueeze(-1)

        is_mine = (labels >= first) & (labels < first + num_real)
        index = (labels - first).clamp(0, max(num_real - 1, 0))
        target = (
            shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~is_mine, 0.0)
            if num_real
            else torch.zeros_like(largest)
        )
        # One collective for both sums.
        sums = torch.stack([shifted.exp_().sum(dim=-1), target])
        dist.all_reduce(sums, group=tp_group)
        log_normaliser = sums[0].log()

        ctx.save_for_backward(logits, largest + log_normaliser, index, is_mine)
        ctx.num_real = num_real
        return log_normaliser - sums[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum, index, is_mine = ctx.saved_tensors
        (grad_loss,) = grad_outputs
        num_real = ctx.num_real
        grad = torch.zeros_like(logits)
        if num_real:
            softmax = (logits[..., :num_real].float() - log_sum.unsqueeze(-1)).exp_()
            softmax.scatter_add_(-1, index.unsqueeze(-1), -is_mine.unsqueeze(-1).to(softmax.dtype))
            grad[..., :num_real] = softmax.mul_(grad_loss.unsqueeze(-1))
        return grad, None, None, None
