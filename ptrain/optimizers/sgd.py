"""Stochastic gradient descent for 16-bit parameters on a CPU, where torch's fused kernel (up to
2.13) reads momenta wrongly and leaves all but a tensor's last few elements as they were
(pytorch/pytorch#191763)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from ptrain.rooms.torch import alike


class SGD(torch.optim.Optimizer):
    """The arithmetic of torch.optim.SGD, an operator at a time, with scalars as temporaries.

    `grad_scale` and `found_inf`, where set, mean what they mean to torch's fused optimizers: what
    gradients are multiplied by (they are left without it), and 1 where the step is to be skipped.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, leaves: ParamsT, *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(leaves, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every tensor that has a gradient."""
        assert closure is None, "closures are not supported"
        for options in self.param_groups:
            for parameter in options["params"]:
                if parameter.grad is not None:
                    self._update(parameter, **options)

    def _update(
        self, parameter: torch.Tensor, lr: float, momentum: float, weight_decay: float, **_: object
    ) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        if self.found_inf is None:
            taken = alike(parameter.new_ones((), dtype=torch.float32), parameter)
        else:
            taken = alike(1 - self.found_inf, parameter)
            gradient.nan_to_num_(0.0, 0.0, 0.0)  # not finite times 0 would not be 0
        if not momentum:
            parameter.addcmul_(parameter, taken, value=-lr * weight_decay)
            parameter.addcmul_(gradient, taken, value=-lr)
            return
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.mul_(1 - taken * (1 - momentum))
        buffer.addcmul_(gradient, taken)
        buffer.addcmul_(parameter, taken, value=weight_decay)
        parameter.addcmul_(buffer, taken, value=-lr)
