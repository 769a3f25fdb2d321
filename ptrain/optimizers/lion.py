"""Lion: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic discovery of optimization
algorithms", arXiv:2302.06675, algorithm 2). torch has none."""

from __future__ import annotations

from typing import Any

import torch

from ptrain.optimizers.by_operator import ByOperator


class PlainLion(torch.optim.Optimizer):
    """An operator at a time, with one temporary like a tensor while that is updated."""

    def __init__(self, leaves: Any, **settings: Any) -> None:
        super().__init__(leaves, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every tensor that has a gradient."""
        for options in self.param_groups:
            for leaf in options["params"]:
                if leaf.grad is not None:
                    state = self.state[leaf]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(leaf)
                    self._update(leaf, leaf.grad, state["exp_avg"], options)

    def _update(
        self,
        leaf: torch.Tensor,
        gradient: torch.Tensor,
        momentum: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        lr, (beta1, beta2) = options["lr"], options["betas"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        leaf.mul_(1 - lr * options["weight_decay"]).add_(direction, alpha=-lr)
        momentum.lerp_(gradient, 1 - beta2)


class Lion(ByOperator, PlainLion):
    """The same with a loss's scale, and on any tier."""


class LionByFormula(PlainLion):
    """The paper's lines, computed in fp64: what a run in fp64 is compared with. In coarser dtypes
    another order of operators would turn other signs."""

    def _update(
        self,
        leaf: torch.Tensor,
        gradient: torch.Tensor,
        momentum: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        lr, (beta1, beta2) = options["lr"], options["betas"]
        theta, m, g = leaf.double(), momentum.double(), gradient.double()
        c = beta1 * m + (1 - beta1) * g
        leaf.copy_(theta - lr * (c.sign() + options["weight_decay"] * theta))
        momentum.copy_(beta2 * m + (1 - beta2) * g)
