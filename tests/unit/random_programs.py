"""Random programs for both runtimes: short sequences of primitives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Generic

from ptrain.cost import State
from ptrain.runtime.interface import PendingResult, T
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType
from tests.unit.both_runtimes import WatchedRuntime
from tests.unit.runtime_programs import (
    BOTH,
    DEVICE,
    INNER,
    OMEGA,
    OUTER,
    SHAPE,
    THETA,
    G,
    Statements,
)


@dataclass
class Variable(Generic[T]):
    """A tensor of a random program; views have the number of their storage's first tensor."""

    tensor: T
    root: int
    is_empty: bool = False


def random_program(seed: int, length: int = 25) -> Callable[[WatchedRuntime[Any]], Statements]:
    """Return a program of the given number of statements, each on random legal tensors."""

    def program(on: WatchedRuntime[Any]) -> Statements:
        return RandomProgram(on, Random(seed)).statements(length)

    program.__name__ = f"drawn_{seed}"
    return program


class RandomProgram:
    """A running random program: its legal statements depend on the runtime's tensors."""

    def __init__(self, on: WatchedRuntime[Any], draw: Random) -> None:
        self.on, self.room, self.draw = on, on.room, draw
        self.variables: list[Variable[Any]] = []
        self.moves: list[PendingResult[Any]] = []
        self.roots = 0

    def statements(self, length: int) -> Statements:
        names = [
            "new", "new", "alike", "cast", "cast", "move", "copy", "add", "view", "view",
            "permute", "drop", "drop", "resize", "gather", "reduce", "sum", "wait",
        ]  # fmt: skip
        for _ in range(length):
            getattr(self, f"_{self.draw.choice(names)}")()
            yield [variable.tensor for variable in self.variables]
        while self.moves:
            self.moves.pop().wait()
            yield ()

    def _keep(self, tensor: Any, root: int | None = None) -> None:
        if root is None:
            self.roots += 1
            root = self.roots
        self.variables.append(Variable(tensor, root))

    def _some(self, tier: Tier | None = None, *, vector: bool = False) -> Variable[Any] | None:
        emptied = {variable.root for variable in self.variables if variable.is_empty}
        fitting = [
            variable
            for variable in self.variables
            if variable.root not in emptied
            and tier in (None, self.on.tier(variable.tensor))
            and not (vector and len(self.room.shape(variable.tensor)) != 1)
        ]
        return self.draw.choice(fitting) if fitting else None

    def _axes(self) -> tuple[Axis, ...]:
        return self.draw.choice(((OUTER,), (INNER,), BOTH))

    def _ranks(self, axes: Sequence[Axis]) -> int:
        return math.prod(self.room.degree(axis) for axis in axes)

    def _dtype(self) -> DType:
        return self.draw.choice((DType.FP32, DType.BF16, DType.FP64))

    def _state(self) -> State:
        return self.draw.choice((THETA, OMEGA, G))

    def _new(self) -> None:
        numel = self.draw.choice((None, 4, 6, 24))
        tier, name = self.draw.choice((DEVICE, *Tier)), self.draw.choice(("", "a", "b"))
        self._keep(self.room.new_empty(numel, self._dtype(), tier, self._state(), name))

    def _alike(self) -> None:
        if source := self._some():
            made = self.draw.choice((self.room.zeros_like, self.room.scalar_like))
            self._keep(made(source.tensor, self._dtype()))
            self._keep(self.room.empty_like(source.tensor, self.draw.choice((1, 8))))

    def _cast(self) -> None:
        if source := self._some():
            dtype, copy = self._dtype(), self.draw.random() < 0.3
            state = self.draw.choice((None, self._state()))
            is_itself = self.room.dtype(source.tensor) is dtype and not copy
            tensor = self.room.cast(source.tensor, dtype, state, "c", copy=copy)
            self._keep(tensor, source.root if is_itself else None)

    def _move(self) -> None:
        if source := self._some():
            self._keep(
                self.room.copy_to_tier(source.tensor, self.draw.choice([*Tier]), self._state())
            )

    def _copy(self) -> None:
        source, into = self._some(), self._some()
        if source and into and source.root != into.root:
            numels = [self.room.numel(variable.tensor) for variable in (source, into)]
            if numels[0] == numels[1]:
                self.room.copy(self.room.cast(source.tensor, DType.FP32, copy=True), into.tensor)

    def _add(self) -> None:
        if total := self._some(vector=True):
            self.room.add(total.tensor, self.room.zeros_like(total.tensor, DType.FP32))
            self.room.fill_zeros(total.tensor)

    def _view(self) -> None:
        source = self._some(vector=True)
        if source and (numel := self.room.numel(source.tensor)) % 4 == 0:
            start, width = self.draw.choice(((0, 4), (numel // 4, numel // 2)))
            view = self.room.view_range(source.tensor, start, (2, width // 2))
            row = self.room.view_window(source.tensor, (4, numel // 4), {0: self.draw.randrange(4)})
            self._keep(self.draw.choice((view, self.room.flatten(row))), source.root)

    def _permute(self) -> None:
        source = self._some(vector=True)
        if source and self.room.numel(source.tensor) == math.prod(SHAPE):
            order = self.draw.choice(((1, 0, 2), (2, 0, 1), (0, 1, 2)))
            lying = self.room.permute(source.tensor, SHAPE, order)
            self.room.unpermute(lying, SHAPE, order, source.tensor)
            self._keep(lying)

    def _drop(self) -> None:
        if self.variables:
            self.variables.pop(self.draw.randrange(len(self.variables)))

    def _resize(self) -> None:
        """Of a tensor on the device that has no view, and nothing under way."""
        roots = [variable.root for variable in self.variables]
        for variable in self.variables:
            if variable.is_empty:
                self.room.allocate_storage(variable.tensor)
                variable.is_empty = False
                return
        variable = self._some(DEVICE, vector=True)
        if variable and not self.moves and roots.count(variable.root) == 1:
            self.room.free_storage(variable.tensor)
            variable.is_empty = True

    def _gather(self) -> None:
        if shard := self._some(DEVICE, vector=True):
            axes, is_awaited = self._axes(), self.draw.random() < 0.5
            numel = self.room.numel(shard.tensor) * self._ranks(axes)
            into = self.room.empty_like(shard.tensor, numel)
            work = self.room.all_gather(shard.tensor, into, axes, is_awaited=is_awaited)
            self.moves.append(PendingResult(into, shard.tensor, work))

    def _reduce(self) -> None:
        axes = self._axes()
        whole, via = self._some(DEVICE, vector=True), self.draw.choice([*ReduceScatterVia])
        if whole and (numel := self.room.numel(whole.tensor)) % self._ranks(axes) == 0:
            into = self.room.empty_like(whole.tensor, numel // self._ranks(axes))
            is_awaited = self.draw.random() < 0.5
            move = self.room.reduce_scatter(whole.tensor, into, axes, via, is_awaited=is_awaited)
            self.moves.append(move)

    def _sum(self) -> None:
        if tensor := self._some(DEVICE):
            is_awaited = self.draw.random() < 0.5
            self.moves.append(
                self.room.all_reduce(tensor.tensor, self._axes(), is_awaited=is_awaited)
            )

    def _wait(self) -> None:
        if self.moves:
            self._keep(self.moves.pop(self.draw.randrange(len(self.moves))).wait())
