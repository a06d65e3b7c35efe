"""Linear layers while tokens are generated: the same sums by whatever kernel is fast."""

from __future__ import annotations

import pytest
import torch

from accelerate_megatron.engine.cpu_products import LinearProduct


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(48, 32), (512, 192), (514, 256), (515, 256)],
    ids=["small", "8-blocks", "2-blocks", "no-blocks"],
)
def test_products_and_sums_are_exact(outputs: int, inputs: int, rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x, residual = (
        torch.randn(*size, generator=generator)
        for size in ((outputs, inputs), (outputs,), (rows, inputs), (rows, outputs))
    )
    product = LinearProduct(weight, bias if has_bias else None)
    before = [tensor.clone() for tensor in (weight, bias, x, residual)]

    result, added = product(x), product.plus(x, residual)

    exact = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(added.double(), exact + residual.double(), rtol=1e-5, atol=1e-4)
    for tensor, copy in zip((weight, bias, x, residual), before, strict=True):
        assert torch.equal(tensor, copy)


def test_a_weight_that_changes_is_seen() -> None:
    weight = torch.nn.Parameter(torch.ones(512, 256))
    product = LinearProduct(weight, None)
    with torch.no_grad():
        weight.mul_(2)

    for rows in (1, 2):
        assert (product(torch.ones(rows, 256)) == 512).all()
