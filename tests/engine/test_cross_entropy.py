"""Cross entropy over a split, padded vocabulary is torch's over the real one."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def losses_and_gradients(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, scale: torch.Tensor
) -> Any:
    """Return this rank's losses and the gradient of its columns, computed in several parts."""
    from accelerate_megatron import engine

    engine.activate("cpu")
    from accelerate_megatron.engine import cross_entropy

    columns = logits.shape[-1] // dist.get_world_size()
    first = dist.get_rank() * columns
    mine = logits[..., first : first + columns].clone().requires_grad_()
    with patch.dict(cross_entropy._TOGETHER, cpu=4 * columns):
        loss = cross_entropy.vocabulary_cross_entropy(
            mine, labels, vocab_size=vocab_size, tp_group=dist.group.WORLD
        )
        (loss * scale).sum().backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize(
    ("num_ranks", "vocab_size"),
    [(1, 32), (1, 29), (2, 32), (2, 20), (4, 29), (4, 8), (4, 5)],
    # 5 of 32 rows: three of four ranks hold padding alone.
)
def test_losses_and_gradients_are_torchs(num_ranks: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 32, generator=generator) * 4
    labels = torch.randint(0, vocab_size, (3, 2), generator=generator)
    scale = torch.rand(3, 2, generator=generator)

    ranks = run_ranks(losses_and_gradients, logits, labels, vocab_size, scale, num_ranks=num_ranks)

    wanted_logits = logits.clone().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(
        wanted_logits[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none"
    ).view(3, 2)
    (wanted * scale).sum().backward()
    for loss, _ in ranks:
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-6)
    gradient = torch.cat([grad for _, grad in ranks], dim=-1)
    torch.testing.assert_close(gradient, wanted_logits.grad, rtol=1e-5, atol=1e-7)
    assert not gradient[..., vocab_size:].any()


def test_huge_logits_and_huge_padding_overflow_nowhere() -> None:
    logits = torch.full((1, 1, 8), 3e4)
    logits[..., 6:] = 3e38  # padding

    ((loss, gradient),) = run_ranks(
        losses_and_gradients, logits, torch.tensor([[2]]), 6, torch.ones(1, 1), num_ranks=1
    )

    assert loss.item() == pytest.approx(torch.tensor(6.0).log().item(), abs=1e-5)
    assert torch.isfinite(gradient).all()


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.zeros(4, 2, dtype=torch.long)

    first, second = run_ranks(
        losses_and_gradients, logits, labels, 60, torch.ones(4, 2), num_ranks=2
    )

    wanted = torch.nn.functional.cross_entropy(
        logits[..., :60].float().flatten(0, 1), labels.flatten(), reduction="none"
    )
    assert first[0].dtype == torch.float32
    assert first[1].dtype == torch.bfloat16
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0].flatten(), wanted, rtol=1e-5, atol=1e-6)
