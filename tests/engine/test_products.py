"""Products of a training step in fp32, by oneDNN on CPUs for which MKL is slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from accelerate_megatron.engine import products

SIZES = {"rows": 48, "in": 40, "out": 56}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let products of any size go to oneDNN; the shapes of their results."""
    shapes: list[tuple[int, ...]] = []
    real = products._product

    def noted(*args: Any) -> torch.Tensor:
        result = real(*args)
        shapes.append(tuple(result.shape))
        return result

    monkeypatch.setattr(products, "_SMALLEST", 0)
    monkeypatch.setattr(products, "_product", noted)
    return shapes


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_linear_layer_and_its_gradients_are_exact(
    has_bias: bool, asked: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(SIZES["rows"], SIZES["in"]), torch.randn(SIZES["out"], SIZES["in"])
    bias = torch.randn(SIZES["out"]) if has_bias else None
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in given]
        output = F.linear(*leaves)
        output.square().sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    with products.OneDnnProducts():
        ours = run(torch.float32)

    assert sorted(asked) == sorted([(48, 56), (48, 40), (56, 40)])
    for mine, exact in zip(ours, run(torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-3)


def test_small_products_and_other_types_are_left_to_torch(asked: list[tuple[int, ...]]) -> None:
    half, double = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).double()
    scaled = torch.randn(8, 8)
    with products.OneDnnProducts():
        results = [half @ half, double @ double, torch.addmm(scaled, scaled, scaled, alpha=0.5)]
    assert not asked
    torch.testing.assert_close(results[2], scaled + 0.5 * scaled @ scaled)


@pytest.mark.parametrize(
    ("vendor", "capability", "dtype", "is_changed"),
    [
        ("AuthenticAMD", "AVX512", torch.float32, True),
        ("AuthenticAMD", "AVX512", torch.bfloat16, False),
        ("GenuineIntel", "AVX512", torch.float32, False),
        ("AuthenticAMD", "AVX2", torch.float32, False),
    ],
)
def test_fp32_is_concerned_where_mkl_is_slow(
    vendor: str,
    capability: str,
    dtype: torch.dtype,
    is_changed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_vendor", lambda: vendor)
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(products, "has_onednn", lambda: True)
    products.has_slow_mkl.cache_clear()

    block = products.fast_products([torch.nn.Linear(2, 2, dtype=dtype)])
    products.has_slow_mkl.cache_clear()

    assert isinstance(block, products.OneDnnProducts) is is_changed
