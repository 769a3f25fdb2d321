"""Muon: momentum, orthogonalized, for the matrices within a model.

The arithmetic is that of torch.optim.Muon with Nesterov momentum, decoupled weight decay and the
learning rate adjusted to the root mean square of AdamW's updates (Liu et al. 2025, "Muon is
scalable for LLM training"). Ours beside torch's, because torch's orthogonalizes in bf16 whatever
the dtype, and fp64 runs are to be compared in fp64; and because an update has to be skipped
(`found_inf`) without a look at a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ptrain.rooms.torch import alike, cast

# The quintic iteration X <- aX + (bA + cA^2) X with A = X X^T, its slope at 0 as large as it can be
# while singular values stay around 1 (K. Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7
ADAMW_RMS = 0.2  # of AdamW's updates in units of lr; an orthogonal A x B has 1 / sqrt(max(A, B))


class Muon(torch.optim.Optimizer):
    """Of 2-d tensors. `grad_scale` and `found_inf`, where set, mean what they mean to torch's fused
    optimizers: what gradients are multiplied by, and 1 where the step is to be skipped."""

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        matrices: Iterable[torch.Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(matrices, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every matrix that has a gradient."""
        assert closure is None, "closures are not supported"
        for options in self.param_groups:
            for matrix in options["params"]:
                if matrix.grad is not None:
                    self._update(matrix, options)

    def _update(self, matrix: torch.Tensor, options: dict[str, float]) -> None:
        momentum, lr = options["momentum"], options["lr"]
        gradient = matrix.grad
        assert gradient is not None and matrix.dim() == 2, "Muon updates matrices only"
        if self.grad_scale is not None:
            gradient = alike(gradient / self.grad_scale, matrix)
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer = state["momentum_buffer"]
        if self.found_inf is None:
            ahead, kept = buffer.lerp_(gradient, 1 - momentum), matrix
        else:
            ahead = alike(buffer.lerp(gradient, 1 - momentum), matrix)
            kept = alike(matrix.clone(), matrix)
        direction = orthogonalized(alike(gradient.lerp(ahead, momentum), matrix))
        kept.mul_(1 - lr * options["weight_decay"])
        kept.add_(direction, alpha=-lr * ADAMW_RMS * math.sqrt(max(matrix.shape)))
        if self.found_inf is not None:
            skipped = alike(self.found_inf != 0, matrix)
            torch.where(skipped, buffer, ahead, out=buffer)
            torch.where(skipped, matrix, kept, out=matrix)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition, roughly: singular values end between 0.7 and 1.2.
    In bf16, as torch does, unless the matrix is fp64."""
    x = cast(matrix, torch.float64 if matrix.dtype == torch.float64 else torch.bfloat16)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = alike(x / x.norm().clamp(min=SMALLEST_NORM), matrix)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = alike(x @ x.T, matrix)
        polynomial = partial(torch.addmm, gram, gram, gram, beta=b, alpha=c)
        x = alike(torch.addmm(x, alike(polynomial(), matrix), x, beta=a), matrix)
    return x.T if is_tall else x


class ExactMuon(torch.optim.Muon):
    """torch's arithmetic without its bf16: the iteration acts on singular values alone, so it is
    done on those of a singular value decomposition."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)

    def _update(self, matrix: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum, buffer = group["momentum"], state["momentum_buffer"]
        buffer.mul_(momentum).add_(matrix.grad, alpha=1 - momentum)
        ahead = momentum * buffer + (1 - momentum) * matrix.grad
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        rms = 0.2 * math.sqrt(max(matrix.shape))
        matrix.sub_(_exactly_orthogonalized(ahead, group), alpha=group["lr"] * rms)


def _exactly_orthogonalized(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    a, b, c = group["ns_coefficients"]
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = sizes / max(float(sizes.square().sum().sqrt()), group["eps"])
    for _ in range(int(group["ns_steps"])):
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    return left @ torch.diag(sizes) @ right
