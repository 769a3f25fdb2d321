"""The update of the one-device reference: torch's own optimizers one tensor at a time, on whole
tensors, in the layout's dtypes. It may read values, and so it says plainly what a step is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT, unit_modules
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import INITIAL_SCALE, SCALE_BACKOFF, SCALE_GROWTH, SCALE_INTERVAL, DType
from ptrain.spec.spec import Spec


class Updater:
    """Master copies where the layout has them, optimizer state, and the scale of the loss."""

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self.spec = spec
        self.layout = spec.precision.effective
        self.parameters = dict(module.named_parameters())
        self.updated: dict[str, Tensor] = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        if self.layout.master is not None:
            dtype = TORCH_DTYPES[self.layout.master]
            self.updated = {
                name: parameter.detach().to(dtype, copy=True)
                for name, parameter in self.updated.items()
            }
        self.optimizers = _optimizers(self.updated, _within_blocks(module), spec)
        self.scale = INITIAL_SCALE if self.layout.scales_loss else 1.0
        self.steps_since_change = 0

    @torch.no_grad()
    def update(self, sums: Mapping[str, Tensor], lr: float) -> float:
        """One step from the gradients of the scaled loss. Returns their norm without the scale,
        infinite where the step is skipped."""
        gradients = list(sums.values())
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients])
        norm = float(squares.sum().sqrt()) / self.scale
        if not math.isfinite(norm) and self.layout.scales_loss:
            self._rescale(overflowed=True)
            return math.inf
        if self.spec.optimizer.clip is not None:
            factor = min(1.0, self.spec.optimizer.clip / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(factor)
        for name, gradient in sums.items():
            tensor = self.updated[name]
            tensor.grad = gradient.to(tensor.dtype) / self.scale
        self._step(lr)
        self._rescale(overflowed=False)
        return norm

    def owner(self, tensor: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer that updates it."""
        (owner,) = (
            optimizer
            for optimizer in self.optimizers
            if any(tensor is one for group in optimizer.param_groups for one in group["params"])
        )
        return owner

    def initial(self, tensor: Tensor) -> dict[str, Tensor]:
        """The optimizer state of an updated tensor before torch makes it."""
        owner = self.owner(tensor)
        if isinstance(owner, torch.optim.AdamW):
            moments = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
            return {**moments, "step": torch.zeros((), dtype=torch.float32)}
        momentum = owner.param_groups[0]["momentum"]
        return {"momentum_buffer": torch.zeros_like(tensor)} if momentum else {}

    def _step(self, lr: float) -> None:
        moments = TORCH_DTYPES[self.layout.moments]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for state in optimizer.state.values():
                for name, tensor in state.items():
                    if name != "step" and tensor is not None:
                        tensor.copy_(tensor.to(moments))
        for name, updated in self.updated.items():
            if updated is not self.parameters[name]:
                self.parameters[name].copy_(updated)

    def _rescale(self, *, overflowed: bool) -> None:
        """GradScaler's rule."""
        if not self.layout.scales_loss:
            return
        self.steps_since_change = 0 if overflowed else self.steps_since_change + 1
        if overflowed:
            self.scale *= SCALE_BACKOFF
        elif self.steps_since_change == SCALE_INTERVAL:
            self.scale *= SCALE_GROWTH
            self.steps_since_change = 0


def _within_blocks(module: nn.Module) -> set[str]:
    """Names of the parameters that some block has."""
    blocks = [name for unit in unit_modules(module) for name in unit if name != ROOT]
    return {
        f"{block}.{name}"
        for block in blocks
        for name, _ in module.get_submodule(block).named_parameters()
    }


def _optimizers(
    updated: Mapping[str, Tensor], within: set[str], spec: Spec
) -> list[torch.optim.Optimizer]:
    settings, dtype = spec.optimizer, spec.precision.effective.updated
    if settings.name == "sgd":
        return [
            torch.optim.SGD(
                updated.values(),
                lr=settings.lr,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                foreach=False,  # the fused one is wrong in 16 bits (pytorch/pytorch#191763)
            )
        ]
    if settings.name == "adamw":
        return [_adamw(list(updated.values()), settings, dtype)]
    assert settings.name == "muon", f"no reference for the optimizer {settings.name}"
    hidden = {name for name, tensor in updated.items() if name in within and tensor.dim() == 2}
    others = [tensor for name, tensor in updated.items() if name not in hidden]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        kind = _ExactMuon if dtype is DType.FP64 else torch.optim.Muon
        muon = kind(
            [updated[name] for name in sorted(hidden)],
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    return [*optimizers, *([_adamw(others, settings, dtype)] if others else [])]


def _form(dtype: DType) -> dict[str, Any]:
    """One tensor, one operator at a time; in 16 bits that would round in every operator, which is
    another arithmetic than rounding once."""
    return {"fused": True} if dtype.itemsize == 2 else {"foreach": False}


def _adamw(tensors: list[Tensor], settings: OptimizerSpec, dtype: DType) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        tensors,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        **_form(dtype),
    )


class _ExactMuon(torch.optim.Muon):
    """torch's arithmetic without its bf16: the iteration acts on singular values alone, so it is
    done on those of a singular value decomposition."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)

    def _update(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum, buffer = group["momentum"], state["momentum_buffer"]
        buffer.mul_(momentum).add_(matrix.grad, alpha=1 - momentum)
        ahead = momentum * buffer + (1 - momentum) * matrix.grad
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        rms = 0.2 * math.sqrt(max(matrix.shape))
        matrix.sub_(_orthogonalized(ahead, group), alpha=group["lr"] * rms)


def _orthogonalized(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    a, b, c = group["ns_coefficients"]
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = sizes / max(float(sizes.square().sum().sqrt()), group["eps"])
    for _ in range(int(group["ns_steps"])):
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    return left @ torch.diag(sizes) @ right
