"""Build optimizers by the name of a rule, for training and for the single-device reference.

`TorchOptimizerFactory` is the optimizer factory of the torch runtime (`rooms.room.Rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from ptrain.models.numerics import TORCH_DTYPES
from ptrain.optimizers.by_operator import (
    SGD,
    ExactMuon,
    Lion,
    LionByFormula,
    Muon,
    NAdam,
    PlainLion,
)
from ptrain.optimizers.update import moment_names
from ptrain.rooms.room import OptimizerLeaf
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.precision import DType

Build: TypeAlias = Callable[..., torch.optim.Optimizer]
Leaves = Sequence[torch.Tensor] | Sequence[dict[str, list[torch.Tensor]]]


class TorchRow(NamedTuple):
    """The optimizer classes of one rule.

    Each takes parameters, `lr`, `weight_decay` and the keys of the rule's row in `OPTIMIZERS`.

    Attributes:
        build: The optimizer that trains.
        reference: Returns the optimizer that updates full tensors of a dtype on a single device.
        in_16_bits: The optimizer for 16-bit parameters on a CPU, if `build` is wrong for them.
    """

    build: Build
    reference: Callable[[DType], Build]
    in_16_bits: Build | None = None


def _reference_adamw(dtype: DType) -> Build:
    """Return the reference AdamW: one tensor and one operator at a time.

    In 16 bits it is fused as in training: unfused, every operator would round its result, while the
    fused kernel rounds once.
    """
    form = {"fused": True} if dtype.itemsize == 2 else {"foreach": False}
    return partial(torch.optim.AdamW, **form)


def _reference_muon(dtype: DType) -> Build:
    """Return the reference Muon: torch's class, or an exact one in fp64 where torch's uses bf16."""
    kind = ExactMuon if dtype is DType.FP64 else torch.optim.Muon
    return partial(kind, adjust_lr_fn="match_rms_adamw")


ROWS: Mapping[str, TorchRow] = {
    "adamw": TorchRow(partial(torch.optim.AdamW, fused=True), _reference_adamw),
    "sgd": TorchRow(
        partial(torch.optim.SGD, fused=True),
        # torch's fused SGD is wrong for 16-bit CPU tensors (pytorch/pytorch#191763)
        lambda _: partial(torch.optim.SGD, foreach=False),
        in_16_bits=SGD,
    ),
    "nadam": TorchRow(
        NAdam, lambda _: partial(torch.optim.NAdam, decoupled_weight_decay=True, foreach=False)
    ),
    "lion": TorchRow(Lion, lambda dtype: LionByFormula if dtype is DType.FP64 else PlainLion),
    "muon": TorchRow(Muon, _reference_muon),
}


def _constructor_arguments(rule: str, spec: OptimizerSpec) -> dict[str, Any]:
    """Return the constructor arguments of a rule's optimizer from the spec."""
    return {key: getattr(spec, key) for key in ("lr", "weight_decay", *OPTIMIZERS[rule].keys)}


def _flat_tensors(leaves: Leaves) -> Iterator[torch.Tensor]:
    """Yield the tensors of a list of tensors or of parameter groups."""
    for leaf in leaves:
        yield from leaf["params"] if isinstance(leaf, dict) else (leaf,)


def build_optimizer(
    rule: str, leaves: Leaves, spec: OptimizerSpec, *, stands_in: bool = False
) -> torch.optim.Optimizer:
    """Build the training optimizer of a rule.

    Args:
        rule: Name of the rule, a key of `ROWS`.
        leaves: Tensors, or parameter groups of them.
        spec: The hyperparameters.
        stands_in: The tensors are CPU tensors that represent GPU tensors, so the GPU's class is
            used.
    """
    build, _, in_16_bits = ROWS[rule]
    on_cpu = [leaf for leaf in _flat_tensors(leaves) if leaf.is_cpu and not stands_in]
    if in_16_bits is not None and any(leaf.itemsize == 2 for leaf in on_cpu):
        build = in_16_bits
    return build(leaves, **_constructor_arguments(rule, spec))


def reference_optimizer(
    rule: str, tensors: Sequence[torch.Tensor], spec: OptimizerSpec, dtype: DType
) -> torch.optim.Optimizer:
    """Build the single-device reference of a rule, for full tensors of a dtype."""
    return ROWS[rule].reference(dtype)(tensors, **_constructor_arguments(rule, spec))


def initial_state(
    rule: str, spec: OptimizerSpec, tensor: torch.Tensor, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Return the state that torch's optimizers create for a tensor before its first step.

    Args:
        rule: Name of the rule.
        spec: Decides the moments of the rule.
        tensor: The parameter.
        device: The device of the state, by default the tensor's.

    Returns:
        Moments as zeros like the tensor, and numbers as 0-d fp32 tensors, by torch's names.
    """
    place = tensor.device if device is None else device
    moments = {name: torch.zeros_like(tensor, device=place) for name in moment_names(rule, spec)}
    numbers = OPTIMIZERS[rule].numbers.items()
    return moments | {
        name: torch.tensor(initial, dtype=torch.float32, device=place) for name, initial in numbers
    }


class TorchLeaf:
    """A parameter of a torch optimizer with its value, gradient and state.

    It is the model's parameter itself, or a tensor that is empty between updates and gets a value
    for each update.
    """

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
        assert self.optimizer is not None, "the leaf has no optimizer"
        state: dict[str, torch.Tensor] = self.optimizer.state[self.tensor]
        return state


class TorchOptimizer:
    """A torch optimizer on its leaves."""

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
            assert isinstance(leaf, TorchLeaf), "the leaf is not a TorchLeaf"
            leaf.optimizer = self.optimizer

    def step(self, lr: float, scalars: tuple[torch.Tensor | None, torch.Tensor] | None) -> None:
        """Update all leaves with this learning rate; `scalars` are loss scale and skip flag."""
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        # torch's fused optimizers read these attributes, which torch.amp.GradScaler sets
        self.optimizer.grad_scale, self.optimizer.found_inf = scalars or (None, None)
        self.optimizer.step()


class TorchOptimizerFactory:
    """The factory of torch optimizers by rule; see `build_optimizer` for `stands_in`."""

    def __init__(self, *, stands_in: bool = False) -> None:
        self.stands_in = stands_in

    def create_leaf(self, like: torch.Tensor, dtype: DType) -> TorchLeaf:
        return TorchLeaf(like.new_empty(0, dtype=TORCH_DTYPES[dtype]))

    def wrap_leaf(self, tensor: torch.Tensor) -> TorchLeaf:
        return TorchLeaf(tensor)

    def create_optimizer(
        self, rule: str, leaves: Sequence[OptimizerLeaf[torch.Tensor]], spec: OptimizerSpec
    ) -> TorchOptimizer:
        return TorchOptimizer(rule, leaves, spec, stands_in=self.stands_in)


def tensor_of(leaf: OptimizerLeaf[torch.Tensor]) -> torch.Tensor:
    """Return the parameter of torch's optimizer that a leaf wraps."""
    assert isinstance(leaf, TorchLeaf), "the leaf is not a TorchLeaf"
    return leaf.tensor
