"""What the program needs of a wrapped model, and what all wraps that leave parameters in the module
have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from ptrain.axes.data.run.flat import parameters_by_unit
from ptrain.axes.data.run.target import (
    Named,
    NamedTarget,
    OfWholeModel,
    ParameterTarget,
)
from ptrain.costs import State
from ptrain.facts.stages import Units
from ptrain.optimizers.update import Scale
from ptrain.rooms.room import OptimizerLeaf
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import Layout
from ptrain.timeline import Kind


class OwnUpdate(Protocol):
    """An optimizer that is part of a wrap: it says where its state lives."""

    def step(self, lr: float, scaling: Scale[torch.Tensor] | None = None) -> None:
        """One update with this learning rate, none where `scaling` says so on the device; the
        parameters are whole when it is over."""

    def tensors(self) -> Iterator[tuple[NamedTarget, dict[str, torch.Tensor]]]:
        """Each target with its optimizer state by name."""
        ...

    def leaves(self) -> Iterator[tuple[NamedTarget, OptimizerLeaf[torch.Tensor]]]:
        """Each target with the leaf that torch's optimizer knows it by."""
        ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]: ...


class WrappedModel(Protocol):
    """What the program needs of a wrap."""

    module: nn.Module

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Around a forward and a backward pass, one after the other."""
        ...

    def forward_pass(self) -> AbstractContextManager[None]:
        """Around the forward pass of a micro-batch whose backward pass is not the next one."""
        ...

    def backward_pass(self, kind: Kind, is_last: bool) -> AbstractContextManager[None]:
        """Around its backward pass, or one half of it. `is_last`: the step's gradients are complete
        after it."""
        ...

    def end_evaluation(self) -> None: ...

    def consume_with(self, update: Callable[[int], None]) -> None: ...

    def reduce_gradients(self) -> None: ...

    def finish_update(self) -> None: ...

    def clear_gradients(self) -> None: ...

    def targets(self) -> Sequence[Sequence[NamedTarget]]: ...

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all targets: those of many may lie in one tensor."""
        ...

    def copies(self) -> Sequence[NamedTarget]:
        """Return the targets of tensors that another stage has itself, where they are counted."""
        ...

    def canonical_name(self, name: str) -> str:
        """The model's name of a tensor, or of its optimizer state (`head.weight.exp_avg`)."""
        ...

    def own(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Tensors by the model's names, under the names that the wrap has for them too."""
        ...

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> OwnUpdate | None: ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]: ...


class ParameterWrap(OfWholeModel):
    """A module whose parameters stay where they are; on one device, all that is needed."""

    def __init__(self, model: nn.Module, units: Units, *, owns_masters: bool = False) -> None:
        self.module = model
        self.model = model
        self.unit_names = units
        self.owns_masters = owns_masters
        self._groups: list[list[ParameterTarget]] = []

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward_pass(self, kind: Kind, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def end_evaluation(self) -> None:
        """Nothing was gathered."""

    def consume_with(self, update: Callable[[int], None]) -> None:
        raise AssertionError("gradients are updated from in backward by flat units alone")

    def reduce_gradients(self) -> None:
        """They are where the optimizer wants them."""

    def finish_update(self) -> None:
        """Nothing is on its way."""

    def clear_gradients(self) -> None:
        for target in self._targets():
            target.parameter.grad = None

    def targets(self) -> list[list[ParameterTarget]]:
        """Return a group of targets for each unit. They are read off the module once, before it
        runs: while a unit is gathered, the module's parameters are not those that the rank
        stores."""
        if not self._groups:
            self._groups = [
                [
                    ParameterTarget(name, parameter, owns_master=self.owns_masters)
                    for name, parameter in named
                ]
                for _, named in parameters_by_unit(self.model, self.unit_names)
            ]
        return self._groups

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> OwnUpdate | None:
        return None

    def _targets(self) -> Iterator[ParameterTarget]:
        return chain.from_iterable(self.targets())

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for target in self._targets():
            yield State.PARAMETERS, target.value()
            if target.gradient is not None:
                yield State.GRADIENTS, target.gradient
