"""FusedAdam against torch's Adam and AdamW, and its contract with the distributed optimizer."""

from __future__ import annotations

import copy

import pytest
import torch

from accelerate_megatron.engine.fused_adam import FusedAdam

# torch's fused kernels and its loops round differently in the last place.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}


def parameters(count: int = 4) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(5, 3, generator=generator)) for _ in range(count)]


def groups(tensors: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": tensors[:2], "weight_decay": 0.1},
        {
            "params": tensors[2:],
            "lr": 3e-3,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.0,
        },
    ]


def train(tensors, optimizer, *, steps: int = 10, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        optimizer.step()
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize(
    ("adam_w_mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
def test_it_is_torchs_optimizer_with_settings_per_group(adam_w_mode, reference):
    ours, theirs, fused = parameters(), parameters(), parameters()

    found = train(ours, FusedAdam(groups(ours), lr=1e-2, adam_w_mode=adam_w_mode))

    expected = train(theirs, reference(groups(theirs), lr=1e-2, foreach=False))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    same_kernel = train(fused, reference(groups(fused), lr=1e-2, fused=True))
    torch.testing.assert_close(found, same_kernel, rtol=0, atol=0)


def test_the_default_is_adamw_without_decay():
    ours, theirs = parameters(), parameters()

    found = train(ours, FusedAdam(ours))

    expected = train(theirs, torch.optim.AdamW(theirs, weight_decay=0.0, fused=True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_step_is_in_the_group_and_the_moments_in_the_state():
    tensors = parameters()
    optimizer = FusedAdam(groups(tensors))

    train(tensors, optimizer, steps=3)

    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all(set(optimizer.state[tensor]) == {"exp_avg", "exp_avg_sq"} for tensor in tensors)


def test_a_group_without_parameters_counts_its_steps_too():
    tensors = parameters(1)
    optimizer = FusedAdam([{"params": tensors}, {"params": []}])

    train(tensors, optimizer, steps=2)

    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


def test_a_parameter_without_a_gradient_stays_and_has_no_state():
    moved, still = parameters(2)
    before = still.detach().clone()
    optimizer = FusedAdam([moved, still], weight_decay=0.1)

    train([moved], optimizer)

    assert torch.equal(still.detach(), before)
    assert still not in optimizer.state


def test_a_saved_state_resumes_bit_for_bit():
    ours, others = parameters(), parameters()
    optimizer = FusedAdam(groups(ours), lr=1e-2)
    train(ours, optimizer, steps=4)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = FusedAdam(groups(others), lr=1e-2)
    for tensor, other in zip(ours, others, strict=True):
        other.data.copy_(tensor.data)
    resumed.load_state_dict(saved)

    found = train(others, resumed, steps=4, seed=2)

    expected = train(ours, optimizer, steps=4, seed=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_parameters_of_several_dtypes_may_share_a_group():
    single, half = parameters(2)
    half.data = half.data.bfloat16()
    alone = copy.deepcopy(half)

    train([single, half], FusedAdam([single, half], lr=1e-2), steps=1)

    alone.grad = half.grad.clone()
    FusedAdam([alone], lr=1e-2).step()
    assert torch.equal(half, alone)


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    (tensor,) = parameters(1)
    before = tensor.detach().clone()
    optimizer = FusedAdam([tensor], lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (tensor**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)

    assert torch.equal(loss.detach(), (before**2).sum())
    assert not torch.equal(tensor.detach(), before)


def test_capturing_in_a_cuda_graph_is_refused():
    with pytest.raises(ValueError, match=r"capturable is True.*optimizer_cuda_graph to False"):
        FusedAdam(parameters(), capturable=True)
