"""Products in half precision on CPUs that have no instructions for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from accelerate_megatron.engine import wide_products as wide

Product = Callable[..., torch.Tensor]
PRODUCTS: dict[str, tuple[Product, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(6, 8), (5, 8), (5,)]),
    "matmul": (torch.matmul, [(4, 6, 8), (8, 5)]),
    "batched": (torch.bmm, [(4, 6, 8), (4, 8, 5)]),
    "added": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), [(4, 6, 5), (4, 6, 8), (4, 8, 5)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 6, 8)] * 3,
    ),
}


def run(product: Product, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = product(*leaves)
    output.float().square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients_are_those_of_fp32_rounded(
    name: str, dtype: torch.dtype
) -> None:
    product, shapes = PRODUCTS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]

    with wide._WideProducts():
        ours = run(product, inputs)
    exact = run(product, [tensor.float() for tensor in inputs])

    assert [tensor.dtype for tensor in ours] == [dtype] * len(ours)
    assert len(ours) == len(exact) == 1 + len(inputs)
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0].float(), exact[0], rtol=precision, atol=precision)
    for mine, theirs in zip(ours[1:], exact[1:], strict=True):
        largest = theirs.abs().max().item()
        # The gradient of the output was rounded too, before it was multiplied.
        torch.testing.assert_close(
            mine.float(), theirs, rtol=4 * precision, atol=4 * precision * largest
        )


def test_fp32_is_left_as_it_is() -> None:
    first, second = torch.randn(6, 8), torch.randn(8, 5)

    with wide._WideProducts():
        product = first @ second

    assert product.equal(first @ second)


@pytest.mark.parametrize(
    ("capability", "machine", "dtype", "is_wide"),
    [
        ("AVX2", "x86_64", torch.bfloat16, True),
        ("AVX2", "x86_64", torch.float32, False),
        ("AVX512", "x86_64", torch.bfloat16, False),
        ("DEFAULT", "aarch64", torch.bfloat16, False),
    ],
)
def test_only_slow_machines_and_half_precision_are_concerned(
    capability: str,
    machine: str,
    dtype: torch.dtype,
    is_wide: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(wide.platform, "machine", lambda: machine)

    block = wide.wide_products([torch.nn.Linear(2, 2, dtype=dtype)])

    assert isinstance(block, wide._WideProducts) is is_wide
