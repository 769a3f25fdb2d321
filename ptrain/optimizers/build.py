"""Build torch's optimizers, and ptrain's own, by a rule's name: for training, and for the
one-device reference. In a running room each is a rule."""

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
    """The classes of one optimizer, of leaves, `lr`, `weight_decay` and what its row reads.

    Attributes:
        build: what trains.
        reference: what updates whole tensors of a dtype on one device, to compare with.
        in_16_bits: what trains leaves of 16 bits on a processor, where `build` is wrong.
    """

    build: Build
    reference: Callable[[DType], Build]
    in_16_bits: Build | None = None


def _adamw(dtype: DType) -> Build:
    """One tensor, one operator at a time; in 16 bits that would round in every operator, which is
    another arithmetic than rounding once."""
    form = {"fused": True} if dtype.itemsize == 2 else {"foreach": False}
    return partial(torch.optim.AdamW, **form)


def _muon(dtype: DType) -> Build:
    kind = ExactMuon if dtype is DType.FP64 else torch.optim.Muon
    return partial(kind, adjust_lr_fn="match_rms_adamw")


ROWS: Mapping[str, TorchRow] = {
    "adamw": TorchRow(partial(torch.optim.AdamW, fused=True), _adamw),
    "sgd": TorchRow(
        partial(torch.optim.SGD, fused=True),
        # the fused one is wrong in 16 bits (pytorch/pytorch#191763)
        lambda _: partial(torch.optim.SGD, foreach=False),
        in_16_bits=SGD,
    ),
    "nadam": TorchRow(
        NAdam, lambda _: partial(torch.optim.NAdam, decoupled_weight_decay=True, foreach=False)
    ),
    "lion": TorchRow(Lion, lambda dtype: LionByFormula if dtype is DType.FP64 else PlainLion),
    "muon": TorchRow(Muon, _muon),
}


def _arguments(rule: str, spec: OptimizerSpec) -> dict[str, Any]:
    return {key: getattr(spec, key) for key in ("lr", "weight_decay", *OPTIMIZERS[rule].keys)}


def _tensors(leaves: Leaves) -> Iterator[torch.Tensor]:
    """Of all groups, where torch hands over groups."""
    for leaf in leaves:
        yield from leaf["params"] if isinstance(leaf, dict) else (leaf,)


def build_optimizer(
    rule: str, leaves: Leaves, spec: OptimizerSpec, *, stands_in: bool = False
) -> torch.optim.Optimizer:
    """torch's optimizer of `leaves`, tensors or groups of them, by a rule's name; `stands_in`: they
    are on a processor for those of a GPU."""
    build, _, in_16_bits = ROWS[rule]
    on_cpu = [leaf for leaf in _tensors(leaves) if leaf.is_cpu and not stands_in]
    if in_16_bits is not None and any(leaf.itemsize == 2 for leaf in on_cpu):
        build = in_16_bits
    return build(leaves, **_arguments(rule, spec))


def reference_optimizer(
    rule: str, tensors: Sequence[torch.Tensor], spec: OptimizerSpec, dtype: DType
) -> torch.optim.Optimizer:
    """Return what updates whole tensors of a dtype on one device by a rule."""
    return ROWS[rule].reference(dtype)(tensors, **_arguments(rule, spec))


def initial_state(
    rule: str, spec: OptimizerSpec, tensor: torch.Tensor, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Return what torch's optimizer keeps of a tensor before its first step, on its device or
    another."""
    place = tensor.device if device is None else device
    moments = {name: torch.zeros_like(tensor, device=place) for name in moment_names(rule, spec)}
    numbers = OPTIMIZERS[rule].numbers.items()
    return moments | {
        name: torch.tensor(initial, dtype=torch.float32, device=place) for name, initial in numbers
    }


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
        assert self.optimizer is not None, "the leaf has no optimizer"
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
            assert isinstance(leaf, TorchLeaf), "the leaf is not a TorchLeaf"
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
    assert isinstance(leaf, TorchLeaf), "the leaf is not a TorchLeaf"
    return leaf.tensor
