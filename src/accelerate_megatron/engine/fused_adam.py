"""Adam and AdamW in plain torch, with the contract of Apex's `FusedAdam`.

Megatron-Core's distributed optimizer saves and restores its state against that contract:
`exp_avg` and `exp_avg_sq` per parameter, and one `step` per parameter *group*. With
`torch.optim.AdamW`, which keeps a step per parameter, it resumes wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW, or Adam (`adam_w_mode=False`), with torch's fused kernels.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        adam_w_mode: Decay the weights themselves (AdamW), not through the gradient (Adam).
        capturable: Must be False; megatron-core 0.19 passes it.

    Raises:
        ValueError: `capturable` is True: the step is a number, which no CUDA graph captures.

    Source: apex/optimizers/fused_adam.py, FusedAdam, for names and state.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError(
                "capturable is True, but this FusedAdam counts its steps in Python, which a CUDA "
                "graph does not capture. Set optimizer_cuda_graph to False."
            )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Also a group whose parameters are all on other ranks counts its steps:
            # Megatron-Core asserts, when it saves, that all groups agree.
            group["step"] = int(group.get("step", 0)) + 1
            for parameters in _by_kernel(group["params"]):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        # The kernel takes a step for each parameter, and only reads it: one will do.
        step = torch.tensor(float(group["step"]), device=parameters[0].device)
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        kernel(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [step] * len(parameters),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _by_kernel(parameters: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Split the parameters that have a gradient into lists that one kernel call takes."""
    lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None and parameter.numel() > 0:
            lists[parameter.device, parameter.dtype].append(parameter)
    return lists.values()
