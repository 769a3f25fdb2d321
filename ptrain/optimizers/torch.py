"""torch's optimizers as the rules of a running room."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ptrain.models.numerics import TORCH_DTYPES
from ptrain.optimizers.build import build_optimizer
from ptrain.rooms.room import OptimizerLeaf
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import DType


class TorchLeaf:
    """`tensor` is the parameter of torch's optimizer: the model's own, or one that is empty between
    updates, where its value is brought to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def value(self) -> torch.Tensor:
        return self.tensor.detach()

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        self.tensor.data = value

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.tensor.grad

    @gradient.setter
    def gradient(self, gradient: torch.Tensor | None) -> None:
        self.tensor.grad = gradient

    @property
    def state(self) -> dict[str, torch.Tensor]:
        assert self.optimizer is not None, "a leaf of an optimizer"
        state: dict[str, torch.Tensor] = self.optimizer.state[self.tensor]
        return state


class TorchOptimizer:
    """One of torch's optimizers on its leaves."""

    def __init__(
        self,
        rule: str,
        leaves: Sequence[OptimizerLeaf[torch.Tensor]],
        spec: OptimizerSpec,
        *,
        stands_in: bool,
    ) -> None:
        tensors = [tensor_of(leaf) for leaf in leaves]
        self.optimizer = build_optimizer(rule, tensors, spec, stands_in=stands_in)
        for leaf in leaves:
            assert isinstance(leaf, TorchLeaf), "a leaf of this room"
            leaf.optimizer = self.optimizer

    def step(self, lr: float, scalars: tuple[torch.Tensor | None, torch.Tensor] | None) -> None:
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        # where torch.amp.GradScaler leaves them for fused optimizers
        self.optimizer.grad_scale, self.optimizer.found_inf = scalars or (None, None)
        self.optimizer.step()


class TorchRules:
    """By name, `optimizers.build`; `stands_in` as there."""

    def __init__(self, *, stands_in: bool = False) -> None:
        self.stands_in = stands_in

    def leaf(self, like: torch.Tensor, dtype: DType) -> TorchLeaf:
        return TorchLeaf(like.new_empty(0, dtype=TORCH_DTYPES[dtype]))

    def leaf_of(self, tensor: torch.Tensor) -> TorchLeaf:
        return TorchLeaf(tensor)

    def optimizer(
        self, rule: str, leaves: Sequence[OptimizerLeaf[torch.Tensor]], spec: OptimizerSpec
    ) -> TorchOptimizer:
        return TorchOptimizer(rule, leaves, spec, stands_in=self.stands_in)


def tensor_of(leaf: OptimizerLeaf[torch.Tensor]) -> torch.Tensor:
    """Return the tensor by which torch's optimizer knows a leaf."""
    assert isinstance(leaf, TorchLeaf), "a leaf of this room"
    return leaf.tensor
