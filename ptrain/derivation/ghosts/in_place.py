"""Simulates the update of tensors that stay in place, for any wrap.

The training code of the update (`optimizers.update`) runs on ghost tensors, once for each kind of
unit. A single device has no wrapper: only autograd and the optimizer allocate.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from ptrain.cost import Footprint, State, Traffic
from ptrain.derivation.ghosts import autograd
from ptrain.derivation.ghosts.clipping import by_operator
from ptrain.derivation.ghosts.wrapping import Times, Wrapped, rows
from ptrain.derivation.tape import Scene, Tape
from ptrain.facts.model import UnitFacts
from ptrain.optimizers.ghost import GhostOptimizerFactory, GhostScale
from ptrain.optimizers.update import ResidentSlot, Slot, TargetsUpdate, rule_of
from ptrain.rooms.ghost import Ghost, GhostRuntime, Storage
from ptrain.rooms.room import Shape
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType, Layout
from ptrain.timeline import Complete, Kind

Shapes = tuple[Shape, ...]


class Cost(NamedTuple):
    """Bytes of optimizer state that an update keeps, and bytes that it allocates temporarily."""

    kept: int
    rise: int


class InPlaceTarget:
    """A tensor that is updated where it is stored, and its gradient."""

    is_in_place = True
    is_frozen = False

    def __init__(self, value: Ghost, gradient: Ghost, *, owns_master: bool) -> None:
        self._value, self._gradient, self.owns_master = value, gradient, owns_master

    def persistent_parameter(self) -> Ghost | None:
        """Return None: the tensor is already in place."""

    def working_gradient(self) -> Ghost:
        return self._gradient

    def value(self) -> Ghost:
        return self._value

    def store(self, value: Ghost) -> None:
        """Do nothing: the value is already stored, or copied in place."""

    def create_slot(self, initial: Ghost) -> Slot[Ghost]:
        return ResidentSlot(initial)


class InPlace:
    """A wrapping whose tensors stay in place.

    Parameters have `stored` elements, gradients `stored_gradients`. The optimizer state is that of
    the shapes in `updated`.
    """

    owns_master = False
    reach: int | None = None

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._costs: dict[tuple[Shapes, bool], Cost] = {}

    def stored(self) -> int:
        """Return the elements of parameters on every rank, including padding."""
        return self.wrapped.facts.numel

    def stored_gradients(self) -> int:
        """Return the elements of gradients on every rank. Frozen parameters have none."""
        return self.wrapped.facts.trained_numel

    def updated(self, unit: UnitFacts, shard: int) -> Shapes:
        """Return the shapes of a unit's tensors that the rank with this shard updates."""
        return unit.trained_shapes

    def footprints(self, shard: int) -> Iterator[Footprint]:
        layout = self.wrapped.plan.update.layout
        parameters = self.stored() * layout.parameters.itemsize
        gradients = self.stored_gradients() * layout.gradients.itemsize
        return rows(parameters, self.optimizer_bytes(shard), gradients)

    def scalars(self) -> Iterator[Traffic]:
        """Yield nothing: gradients and scalars are on the device."""
        yield from ()

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        yield unit.trained_numel

    def notes(self) -> Iterator[str]:
        yield from ()

    @cached_property
    def kinds(self) -> list[tuple[UnitFacts, int]]:
        """One unit of each kind, with the number of equal units.

        Units of equal shapes have equal memory and traffic, except that Muon updates only matrices
        outside the root.
        """
        kinds: dict[Hashable, list[UnitFacts]] = {}
        apart = self.wrapped.plan.is_apart
        for unit in self.wrapped.facts.units:
            frozen = tuple([tensor.is_frozen for tensor in unit.tensors])
            kind = unit.shapes, frozen, unit.is_root, apart(unit.modules), self.turn_of(unit)
            kinds.setdefault(kind, []).append(unit)
        return [(units[0], len(units)) for units in kinds.values()]

    def turn_of(self, unit: UnitFacts) -> Hashable:
        """Return a key of the treatment that depends on a unit's place among others."""
        return None

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return 0: without sharded tensors all ranks are equal."""
        return 0

    def numels(self, shard: int) -> list[int]:
        """Return the elements of each tensor that the rank with this shard updates."""
        by_kind: dict[tuple[Shapes, bool], list[int]] = {}
        numels: list[int] = []
        for unit in self.wrapped.facts.units:
            kind = unit.trained_shapes, self.wrapped.plan.is_apart(unit.modules)
            if kind not in by_kind:
                by_kind[kind] = [math.prod(shape) for shape in self.updated(unit, shard)]
            numels += by_kind[kind]
        return numels

    def shapes_by_rule(self, shard: int) -> dict[str, list[Shape]]:
        """Return the shapes that the rank with this shard updates, by update rule."""
        optimizer = self.wrapped.spec.optimizer
        needs = not optimizer.row.is_elementwise
        by_rule: dict[str, list[Shape]] = {}
        for unit, times in self.kinds:
            hidden = [needs and unit.is_hidden(tensor) for tensor in unit.trained]
            for shape, is_matrix in zip(self.updated(unit, shard), hidden, strict=True):
                by_rule.setdefault(rule_of(optimizer, is_matrix), []).extend([shape] * times)
        return by_rule

    def optimizer_bytes(self, shard: int) -> int:
        """Return the bytes of optimizer state on the rank with this shard."""
        return sum(
            times * self._cost(unit, self.updated(unit, shard)).kept for unit, times in self.kinds
        )

    def rises(self, shard: int) -> Iterator[int]:
        """Yield the temporary bytes of the update of each kind of unit."""
        yield from (self._cost(unit, self.updated(unit, shard)).rise for unit, _ in self.kinds)

    def _cost(self, unit: UnitFacts, shapes: Shapes) -> Cost:
        """Return the cached cost of a unit's update."""
        key = shapes, unit.is_root
        if key not in self._costs:
            needs = not self.wrapped.spec.optimizer.row.is_elementwise
            hidden = [needs and unit.is_hidden(tensor) for tensor in unit.trained]
            self._costs[key] = self.played(shapes, hidden)
        return self._costs[key]

    def played(self, shapes: Shapes, hidden: Sequence[bool]) -> Cost:
        """Return the cost of updating tensors of these shapes. `hidden` marks the matrices that
        Muon updates."""
        spec, layout = self.wrapped.spec, self.wrapped.plan.update.layout
        own = spec.optimizer, layout, self.owns_master, spec.is_for_cuda
        return _cost_of(tuple(shapes), tuple(hidden), *own)


class InPlaceUpdate:
    """The end of a step of a wrap whose tensors stay in place."""

    scene: Scene
    tape: Tape
    wrapping: InPlace

    def kind_of_shard(self, shard: int) -> Hashable:
        return self.wrapping.kind_of_shard(shard)

    def reduce(self) -> None:
        """Reduce nothing. The overflow check of scaled gradients allocates a scalar."""
        plan = self.scene.plan
        if plan.update.layout.scales_loss and plan.wrap.keeps_gradients_on_device:
            self.tape.spike(DType.FP32.itemsize)

    def clipped(self, shard: int) -> list[list[int]] | None:
        return by_operator(self.scene, self.wrapping.numels(shard))

    def update(self, shard: int) -> None:
        for rise in self.wrapping.rises(shard):
            self.tape.spike(rise)
        if self.tape.clock is not None:
            for rule, shapes in self.wrapping.shapes_by_rule(shard).items():
                self.tape.clock.update(rule, self.scene.plan.update.layout, shapes)

    def begin_passes(self) -> None:
        """Do nothing: an update in place leaves no work to the passes."""

    def settle(self) -> None:
        """Do nothing: a pass leaves no work to the next one."""

    def end_passes(self) -> None:
        """Do nothing: passes leave no work."""

    def finish_update(self) -> None:
        """Do nothing: no communication is in progress."""


class OneDevice(InPlace):
    """The wrapping of a model without a wrapper."""

    reach: int | None = 0

    def sent(self, times: Times | None) -> Iterator[Traffic]:
        """Yield nothing: there are no other ranks."""
        yield from ()

    def player(self, scene: Scene) -> Local:
        return Local(scene, self)


class Local(InPlaceUpdate):
    """The wrap that keeps autograd's gradients in place and adds later ones to them."""

    updates_alike = False

    def __init__(self, scene: Scene, wrapping: InPlace) -> None:
        self.scene, self.tape, self.wrapping = scene, scene.tape, wrapping
        self.is_first = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_first = is_first

    def begin_half(self, kind: Kind) -> None:
        """Do nothing: gradients stay where they are."""

    def end_half(self, kind: Kind) -> None:
        """Do nothing: gradients are not reduced."""

    def enter(self, unit: int) -> None:
        """Do nothing: parameters are not gathered."""

    def leave(self, unit: int) -> None:
        """Do nothing: parameters are not freed."""

    def before_backward(self, unit: int) -> None:
        """Do nothing: parameters are not gathered."""

    def after_backward(self, unit: int) -> None:
        """Do nothing: gradients are not reduced."""

    def complete(self, gradient: Complete) -> None:
        dtype = self.scene.plan.update.layout.gradients
        if self.is_first:
            self.tape.spike(autograd.rise(gradient))
            self.tape.add(autograd.kept(gradient))
            autograd.keeps(self.tape, dtype, gradient)
        else:
            self.tape.add(autograd.added(gradient))
            autograd.adds(self.tape, dtype, gradient)

    def gathered(self) -> int:
        return 0

    def lingering(self) -> int:
        return 0

    def signature(self) -> Hashable:
        return self.is_first


@lru_cache(maxsize=2**8)  # a search derives many specs with equal updates
def _cost_of(
    shapes: Shapes,
    hidden: tuple[bool, ...],
    optimizer: OptimizerSpec,
    layout: Layout,
    owns_master: bool,
    is_for_cuda: bool,
) -> Cost:
    tape = Tape(is_reading=False)
    room, dtype = GhostRuntime(tape, {}, {}), layout.parameters
    if owns_master and layout.master is not None:
        dtype = layout.master

    def ghost(shape: Shape, dtype: DType, state: State) -> Ghost:
        size = math.prod(shape) * dtype.itemsize
        return Ghost(Storage(size, Tier.DEVICE, state, "", tape), dtype, shape)

    targets = [
        InPlaceTarget(
            ghost(shape, dtype, State.PARAMETERS),
            ghost(shape, layout.gradients, State.GRADIENTS),
            owns_master=owns_master,
        )
        for shape in shapes
    ]
    rules = GhostOptimizerFactory(tape, is_cpu=not is_for_cuda)
    update = TargetsUpdate([targets], optimizer, layout, room, rules, [hidden])
    tape.is_reading = True
    update.step(0.0, GhostScale(tape) if layout.scales_loss else None)
    tape.is_reading = False
    kept = {id(ghost.storage): ghost.storage.size for _, ghost in update.storages()}
    return Cost(sum(kept.values()), tape.peak)
