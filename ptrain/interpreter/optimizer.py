"""torch's own optimizers on local shards, or on master copies of them that belong to Omega."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ptrain.axes.data.target import Target
from ptrain.costs import State
from ptrain.errors import Fault, SpecError
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.spec.precision import Layout
from ptrain.spec.spec import OptimizerSpec


class Update:
    """The update of all targets. One torch optimizer per group of targets, so that what a group
    needs only for its update (a gathered parameter, a cast gradient) is gone before the next."""

    def __init__(
        self, groups: Sequence[Sequence[Target]], spec: OptimizerSpec, layout: Layout
    ) -> None:
        self.layout = layout
        if layout.master is None:
            groups = _merge(groups)
        self.groups = [_Group(targets, spec, layout) for targets in groups]

    def step(self, lr: float) -> None:
        """One update with this learning rate, from the targets' gradients."""
        for group in self.groups:
            group.step(lr)

    def tensors(self) -> Iterator[tuple[Target, dict[str, torch.Tensor]]]:
        """Each target with its optimizer state by name: exp_avg, exp_avg_sq, step, master …"""
        for group in self.groups:
            yield from group.tensors()

    def prepare(self) -> None:
        """Make the state that torch makes in its first step, so that it can be loaded into."""
        for group in self.groups:
            group.prepare()

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for _, tensors in self.tensors():
            for tensor in tensors.values():
                yield State.OPTIMIZER, tensor


class _Group:
    def __init__(self, targets: Sequence[Target], spec: OptimizerSpec, layout: Layout) -> None:
        self.targets = list(targets)
        self.has_master = layout.master is not None
        self.nothing = targets[0].value().new_empty(0)
        if layout.master is not None:
            dtype = TORCH_DTYPES[layout.master]
            self.leaves = [target.value().to(dtype, copy=True) for target in targets]
        else:
            self.leaves = [self.nothing.clone() for _ in targets]
        self.optimizer = _build(self.leaves, spec)

    def step(self, lr: float) -> None:
        for leaf, target in zip(self.leaves, self.targets, strict=True):
            gradient = target.gradient
            if not self.has_master:
                leaf.data = target.value()
            leaf.grad = None if gradient is None else gradient.to(leaf.dtype)
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        self.optimizer.step()
        for leaf, target in zip(self.leaves, self.targets, strict=True):
            leaf.grad = None
            target.store(leaf.detach())
            if not self.has_master:
                leaf.data = self.nothing

    def prepare(self) -> None:
        for leaf, target in zip(self.leaves, self.targets, strict=True):
            state = self.optimizer.state[leaf]
            if state:
                continue
            like = leaf if self.has_master else target.value()
            if isinstance(self.optimizer, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32, device=like.device)
                state["exp_avg"] = torch.zeros_like(like)
                state["exp_avg_sq"] = torch.zeros_like(like)
            elif self.optimizer.param_groups[0]["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(like)

    def tensors(self) -> Iterator[tuple[Target, dict[str, torch.Tensor]]]:
        for leaf, target in zip(self.leaves, self.targets, strict=True):
            state = {
                name: value
                for name, value in self.optimizer.state[leaf].items()
                if isinstance(value, torch.Tensor)
            }
            if self.has_master:
                state["master"] = leaf
            yield target, state


def _merge(groups: Sequence[Sequence[Target]]) -> list[list[Target]]:
    """One group of all targets that hold their tensor anyway; those that gather it stay apart."""
    together = [target for group in groups if len(group) > 1 for target in group]
    apart = [list(group) for group in groups if len(group) == 1]
    return [together, *apart] if together else apart


def _build(leaves: list[torch.Tensor], spec: OptimizerSpec) -> torch.optim.Optimizer:
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(
                leaves,
                lr=spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                fused=True,
            )
        case "sgd":
            return torch.optim.SGD(
                leaves,
                lr=spec.lr,
                momentum=spec.momentum,
                weight_decay=spec.weight_decay,
                fused=True,
            )
        case name:
            raise SpecError(
                Fault(
                    place="optimizer.name",
                    finding=f"{name} is not executed yet",
                    remedy="use adamw or sgd",
                )
            )
