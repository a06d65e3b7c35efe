"""What is added to the scores of cached keys, as kernels that cannot run here want it."""

from __future__ import annotations

import pytest
import torch

from accelerate_megatron.engine import kv_cache
from accelerate_megatron.engine.kv_cache import KeyValueCache, SelfCache

CAPACITY, HEADS, CHANNELS = 16, 2, 8


@pytest.mark.parametrize("kind", ["distances", "window behind padding"])
def test_the_bias_of_every_token_begins_where_a_kernel_that_reads_16_bytes_can_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's memory-efficient kernel checks this address; its dispatch pads by strides alone.
    addresses = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, attn_mask: torch.Tensor, **settings: float) -> torch.Tensor:
        addresses.append(attn_mask.data_ptr() % 16)
        return attend(*tensors, attn_mask=attn_mask, **settings)

    monkeypatch.setattr(kv_cache.F, "scaled_dot_product_attention", watched)
    cache = KeyValueCache(CAPACITY, torch.bfloat16)
    if kind == "distances":
        cache.by_distance = torch.randn(1, HEADS, 1, CAPACITY).bfloat16()
    else:
        padding = torch.tensor([[True], [False]])
        cache = KeyValueCache(CAPACITY, torch.bfloat16, padding=padding)
    layer = SelfCache(cache, scale=1.0, window=None if kind == "distances" else 5)

    for _ in range(CAPACITY):
        cache.begin(1)
        heads = torch.randn(1, 2, HEADS, 2, CHANNELS).bfloat16()
        layer.attend(heads, torch.randn(1, 2, HEADS, CHANNELS).bfloat16())

    assert addresses == [0] * CAPACITY
