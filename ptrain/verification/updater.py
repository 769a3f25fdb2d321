"""The update of the one-device reference: torch's own optimizers one tensor at a time, on whole
tensors, in the layout's dtypes. It may read values, and so it says plainly what a step is."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT, unit_modules
from ptrain.optimizers.build import initial_state, reference_optimizer
from ptrain.optimizers.update import rule_of
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.precision import INITIAL_SCALE, SCALE_BACKOFF, SCALE_GROWTH, SCALE_INTERVAL
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
        within = _within_blocks(module)
        self._rules = {
            name: rule_of(spec.optimizer, name in within and tensor.dim() == 2)
            for name, tensor in self.updated.items()
        }
        self.optimizers = {
            rule: reference_optimizer(
                rule,
                [self.updated[name] for name, own in self._rules.items() if own == rule],
                spec.optimizer,
                self.layout.updated,
            )
            for rule in dict.fromkeys(self._rules.values())
        }
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

    def owner(self, name: str) -> torch.optim.Optimizer:
        """Return the optimizer that updates a tensor."""
        return self.optimizers[self._rules[name]]

    def initial(self, name: str) -> dict[str, Tensor]:
        """The optimizer state of an updated tensor before torch makes it."""
        return initial_state(self._rules[name], self.spec.optimizer, self.updated[name])

    def _step(self, lr: float) -> None:
        moments = TORCH_DTYPES[self.layout.moments]
        for rule, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for state in optimizer.state.values():
                for name, tensor in state.items():
                    if name not in OPTIMIZERS[rule].numbers and tensor is not None:
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
