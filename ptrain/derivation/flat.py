"""Simulates flat units: the training code of `axes.data.units` runs on fake tensors.

The only part of torch that is imitated is autograd's treatment of a gradient: it adds the gradient
to an existing one, takes it over, or copies it (`cloned`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby, product
from typing import Any

from ptrain.axes.data.cost import iter_runs, shard_runs, whole_runs
from ptrain.axes.data.cuts import Axes, ShardLayout
from ptrain.axes.data.theta import Parameters
from ptrain.axes.data.units import ModelRuntime, U, UnitParts, UnitRuntime, buckets_of
from ptrain.axes.data.update import ShardTarget, TensorsUpdate, TensorTarget, UnitState
from ptrain.cost import Collective, State
from ptrain.derivation.ghosts import wrapping
from ptrain.derivation.tape import Scene, Wrap
from ptrain.facts.model import TensorFacts, UnitFacts
from ptrain.optimizers.ghost import GhostOptimizerFactory, GhostScale
from ptrain.optimizers.groups import TargetRules, rules_of_unit
from ptrain.optimizers.update import Target, TargetsUpdate, UpdateGroup
from ptrain.runtime.ghost import EventReceiver, Ghost, GhostRuntime, Storage
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.placement import Axis, Tier
from ptrain.steps.step import Clip, Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Complete, Kind, Mark

# The views of a rank's gradients that have separate norms. They are needed if tensors whose
# operators are sharded have norms apart from those of other tensors.


Views = tuple[tuple[int, bool], ...]  # elements, and whether their operators are sharded
Degrees = tuple[tuple[Axis, int], ...]
# The key of equal units: elements and flag of each tensor, the axes that shard their gradients, the
# size of their buffer, and the axes that shard any state, with their degrees.
Cut = tuple[Views, Axes, int, Axes, tuple[int, ...]]


class NormedViews:
    """The views of a rank's gradients that have separate norms, for all units. Equal units share
    views."""

    def __init__(self, states: Iterable[tuple[UnitState[Ghost], int]]) -> None:
        """Collect the units.

        Args:
            states: Each unit's state, with the number of units that it represents.
        """
        numbers: dict[Cut, int] = {}
        self._number_of: list[int] = []  # by unit
        self._cut_over: list[Axes] = []  # by unit
        degrees: dict[Axis, int] = {}
        for state, times in states:
            members, gradients, cuts = state.members, state.gradients, state.cuts
            if gradients.kept is None:
                continue
            tensors = tuple(zip(map(math.prod, members.shapes), members.are_cut, strict=True))
            kind = tensors, gradients.now, cuts.padded, cuts.axes, cuts.degrees
            self._number_of += [numbers.setdefault(kind, len(numbers))] * times
            self._cut_over += [members.cutting_axes] * times
            degrees |= {axis: cuts.room.degree(axis) for axis in gradients.now}
        self._cuts, self._axes = tuple(numbers), tuple(degrees)
        self._views: list[tuple[Views, ...]] = []

    def shard_kinds(self, degrees: Degrees) -> Sequence[int]:
        """Return a number for each shard over these axes, outermost first. Shards with equal views
        have equal numbers."""
        kinds, self._views = _number_views(self._cuts, degrees)
        return kinds

    def by_operator(self, kind: int, clip: Clip) -> list[list[int]]:
        """Return the elements of all views of a kind of shard, by group of the norm.

        Args:
            kind: A number that `shard_kinds` returned.
            clip: The clipping step, which defines the groups.

        Returns:
            For each group, the elements of each view.
        """
        of_kinds, whole = self._views[kind], len(clip.groups) - 1
        groups: list[list[int]] = [[] for _ in clip.groups]
        for number, cut_over in zip(self._number_of, self._cut_over, strict=True):
            cut = clip.group_of(cut_over)
            for numel, is_cut in of_kinds[number]:
                groups[cut if is_cut else whole].append(numel)
        return groups


@lru_cache(maxsize=2**8)
def _number_views(
    cuts: tuple[Cut, ...], degrees: Degrees
) -> tuple[list[int], list[tuple[Views, ...]]]:
    """Return the number of each shard's views, and by number the views in each kind of unit.

    The result is cached, because a search asks for the same units hundreds of times.
    """
    of_cuts = [_views_by_shard(cut, degrees) for cut in cuts]
    shards = zip(*of_cuts, strict=True) if cuts else [()] * math.prod(d for _, d in degrees)
    numbers: dict[tuple[Views, ...], int] = {}
    kinds = [numbers.setdefault(views, len(numbers)) for views in shards]
    return kinds, [*numbers]


@lru_cache(maxsize=2**10)
def _views_by_shard(cut: Cut, degrees: Degrees) -> list[Views]:
    """Return the views of a unit in each shard over axes.

    An axis that does not shard the gradients has one place.
    """
    tensors, cutting, padded, axes, own = cut
    # A search derives units of thousands of shards, and most of them are in one tensor each. The
    # strides give each shard's number without a walk over the runs for every place.
    if {*axes} <= {*cutting}:  # a shard is one contiguous range
        views = _views_in_order(tensors, padded, math.prod(own))
        strides = {axis: math.prod(own[at + 1 :]) for at, axis in enumerate(axes)}
        indices = [0]
        for axis, degree in degrees:
            steps = [strides.get(axis, 0) * place for place in range(degree)]
            indices = [index + step for index in indices for step in steps]
        return [views[index] for index in indices]
    all_views = []
    for place in product(*(range(degree) for _, degree in degrees)):
        at = dict(zip((axis for axis, _ in degrees), place, strict=True))
        places = tuple([at.get(axis, 0) if axis in cutting else None for axis in axes])
        all_views.append(_view_sizes(shard_runs(tensors, padded, own, places)))
    return all_views


def _views_in_order(tensors: Views, padded: int, shards: int) -> list[Views]:
    """Return the views of each of `shards` equal parts of a buffer.

    Most parts lie within one run of tensors with the same flag, and have a single view.
    """
    size = padded // shards
    views: list[Views | None] = [None] * shards
    for start, end, is_cut in whole_runs(tensors, padded):
        # Shards that lie between the run's ends have one view. Only the shards that contain an end
        # of a run are walked.
        first, last = -(-start // size), end // size
        views[first:last] = [((size, is_cut),)] * (last - first)
    return [
        _view_sizes(iter_runs(tensors, padded, [(index * size, (index + 1) * size)]))
        if alone is None
        else alone
        for index, alone in enumerate(views)
    ]


def _view_sizes(of_shard: Iterable[tuple[int, int, bool]]) -> Views:
    return tuple([(end - start, is_cut) for start, end, is_cut in of_shard])


# Runs an action on (number of a unit, item), counted for all units that the unit represents.
Repeat = Callable[[Iterable[tuple[int, Any]], Callable[[Any], None]], None]

SCALE_BYTES = 4  # an fp32 scalar: the clipping scale, or the overflow flag

_HOOKS = {
    Collective.ALL_GATHER: Hook.FLAT_GATHER,
    Collective.REDUCE_SCATTER: Hook.FLAT_REDUCE,
    Collective.ALL_REDUCE: Hook.FLAT_REDUCE,
}


class GhostMembers:
    """The tensors of a unit that share a buffer, with autograd's treatment of their gradients."""

    def __init__(self, tensors: Sequence[TensorFacts], reader: EventReceiver) -> None:
        self.names = [tensor.name for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.are_cut = [tensor.is_cut for tensor in tensors]
        self.cutting_axes = next((t.cut_over for t in tensors if t.is_cut), ())
        self._reader = reader
        self._values: Ghost | None = None  # the buffer of which parameters are views
        self._bound: dict[int, Ghost] = {}  # by tensor, the buffer of its gradient
        self._gradients: dict[int, Storage] = {}

    def bind_views(self, whole: Ghost) -> None:
        """Make the parameters views of a full buffer."""
        self._values = whole

    def write_gradient(self, index: int, whole: Ghost, *, is_bound: bool) -> None:
        """Copy a gradient into the buffer, or fill its place with zeros if there is none.

        Args:
            index: The tensor's index in the unit.
            whole: The full buffer.
            is_bound: True if the gradient becomes a view of the buffer.
        """
        gradient = self._gradients.pop(index, None)
        size = math.prod(self.shapes[index]) * whole.dtype.itemsize
        if gradient is None:
            self._reader.record_operator(OperatorKind.POINTWISE, whole.dtype, size)
        else:
            self._reader.record_operator(OperatorKind.COPY, whole.dtype, gradient.size + size)
        self._bound.pop(index, None)
        if is_bound:
            self._bound[index] = whole

    def add_gradient(self, index: int, whole: Ghost) -> None:
        """Copy a gradient, if there is one, into the buffer.

        Args:
            index: The tensor's index in the unit.
            whole: The full buffer.
        """
        if (gradient := self._gradients.pop(index, None)) is not None:
            size = gradient.size + math.prod(self.shapes[index]) * whole.dtype.itemsize
            self._reader.record_operator(OperatorKind.COPY, whole.dtype, size)

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        self._bound.clear()
        self._gradients.clear()

    def accept_gradient(self, index: int, gradient: Complete) -> None:
        """Accept a completed gradient: add it to the existing one, or keep it, copied if it is
        cloned.

        Args:
            index: The tensor's index in the unit.
            gradient: The gradient, with its size in bytes.
        """
        self._reader.record_allocation(wrapping.added_bytes(gradient), Tier.DEVICE)
        if index in self._bound:
            dtype = self._bound[index].dtype
            self._reader.record_operator(OperatorKind.POINTWISE, dtype, 3 * gradient.size)
        elif index not in self._gradients:
            name, state = self.names[index], State.GRADIENTS
            self._reader.record_allocation(gradient.beside, Tier.DEVICE)
            kept = Storage(gradient.size, Tier.DEVICE, state, name, self._reader)
            self._reader.record_allocation(-gradient.beside, Tier.DEVICE)
            self._gradients[index] = kept


class RepeatedUnits(ModelRuntime[Ghost]):
    """The units that are simulated, each counted for all the units it represents."""

    def __init__(
        self,
        units: Sequence[UnitParts[Ghost]],
        step: FlatUnits,
        repeat: Repeat,
        *,
        is_pipelined: bool,
    ) -> None:
        super().__init__(units, step, is_pipelined=is_pipelined)
        self._repeat = repeat
        self._place: dict[object, int] = {unit: place for place, unit in enumerate(self.all)}

    def for_each(self, units: Iterable[U], act: Callable[[U], None]) -> None:
        """Run `act` on the units, counted for all the units they represent."""
        self._repeat(((self._place[unit], unit) for unit in units), act)


class RepeatedUpdate(TargetsUpdate[Ghost, Target[Ghost]]):
    """The update of the simulated units, each counted for all the units it represents."""

    repeat: Repeat

    def for_each_group(self, act: Callable[[UpdateGroup[Ghost, Target[Ghost]]], None]) -> None:
        assert self.is_by_unit, "a flat unit is updated by itself"
        self.repeat(enumerate(self.groups), act)


class Flat(Wrap):
    """A wrap of flat units, driven by the marks of a timeline.

    The storages that the units keep between steps are allocated before the tape reads.

    Args:
        scene: The scene of the wrap.
        step: How the units are wrapped.
        chosen: The units to simulate. None simulates those of the scene.
    """

    updates_alike = True

    def __init__(
        self,
        scene: Scene,
        step: FlatUnits,
        *,
        chosen: Sequence[UnitFacts] | None = None,
    ) -> None:
        self.scene, self.step, self.tape = scene, step, scene.tape
        facts, times = (scene.units, scene.times) if chosen is None else (chosen, (1,))
        degrees = {axis: scene.spec.degree(axis) for axis in step.axes}
        # Storages that exist between steps are counted as resident memory
        # (`derivation.pipeline.resident`). The tape would count them a second time.
        scene.tape.is_reading = False
        scene.tape.hooks.update(_HOOKS)
        self.room = GhostRuntime(scene.tape, degrees, {})
        buckets = [own for own in places_of(scene.plan, facts) if facts[own[0]].numel]
        self.used = [_join_units([facts[place] for place in bucket]) for bucket in buckets]
        self.times = [times[bucket[0]] for bucket in buckets]
        self.members = [GhostMembers(unit.trained, scene.tape) for unit in self.used]
        self._cuts: dict[tuple[int, tuple[Axis, ...]], ShardLayout[Ghost]] = {}
        self.parts = [self._make_parts(*pair) for pair in zip(self.used, self.members, strict=True)]
        is_pipelined = scene.plan.pipeline is not None
        self.units = RepeatedUnits(self.parts, step, self._repeat, is_pipelined=is_pipelined)
        self.update_of = self._make_update()
        numbers = {place: number for number, bucket in enumerate(buckets) for place in bucket}
        self._played = [numbers.get(place) for place in range(len(facts))]
        self._root = len(facts) - 1
        self._place = {
            name: (number, index)
            for number, members in enumerate(self.members)
            for index, name in enumerate(members.names)
        }
        self.is_last = True
        self.half: Kind | None = None
        # The first step leaves state to the second one (gathers in flight, shards in place of full
        # parameters). A prediction is about steady steps.
        if step.first_differs:
            self._first_step()
        scene.tape.is_reading = True

    def _repeat(self, numbered: Iterable[tuple[int, Any]], act: Callable[[Any], None]) -> None:
        """Run `act` on numbered units, counted for all the units they represent.

        The units of a block take turns if blocks are repeated.
        """
        # Units of one block have equal `times` and are adjacent. The whole block is repeated, not
        # each unit in turn, because a unit frees what its neighbour in the block left.
        for times, of_block in groupby(numbered, key=lambda pair: self.times[pair[0]]):
            turn = partial(_run_each, act, [item for _, item in of_block])
            self.tape.repeat(times if self.tape.is_reading else 1, turn)

    def _make_parts(self, unit: UnitFacts, members: GhostMembers) -> UnitParts[Ghost]:
        step, layout = flat_step_of(self.scene.plan, unit), self.scene.plan.update.layout
        trained = frozen = None
        if unit.trained:
            trained = UnitState(members, self._cuts_of(unit.trained_numel, step), step, layout)
        if others := [tensor for tensor in unit.frozen if not tensor.num_quantized]:
            kept = GhostMembers(others, self.tape)
            cuts = self._cuts_of(sum(tensor.numel for tensor in others), step.of_frozen)
            frozen = Parameters(kept, cuts, step.of_frozen, layout)
        return UnitParts(trained=trained, frozen=frozen, step=step, is_root=unit.is_root)

    def _cuts_of(self, numel: int, step: FlatUnits) -> ShardLayout[Ghost]:
        """Return the shards of a buffer. Equal units share them."""
        kind = numel, cut_axes(step)
        if kind not in self._cuts:
            self._cuts[kind] = ShardLayout(self.room, *kind, self.step.reduce_scatter)
        return self._cuts[kind]

    def _make_update(self) -> RepeatedUpdate:
        optimizer, layout = self.scene.spec.optimizer, self.scene.plan.update.layout
        states = [[] if parts.trained is None else [parts.trained] for parts in self.parts]
        groups: list[list[Target[Ghost]]] = [
            [ShardTarget(state) for state in own] for own in states
        ]
        by_unit = [rules_of_unit(optimizer, unit) for unit in self.used]
        target_rules: list[TargetRules] = [
            [own] * len(of_unit) for own, of_unit in zip(by_unit, states, strict=True)
        ]
        # Muon orthogonalizes matrices, so it needs tensors in full. Elementwise rules update a
        # shard as one flat tensor.
        if not optimizer.is_elementwise:
            updates = [[TensorsUpdate(state) for state in own] for own in states]
            groups = [
                [
                    TensorTarget(update, index)
                    for update in own
                    for index in range(len(update.shapes))
                ]
                for own in updates
            ]
            target_rules = [[(rule,) for rule in own] for own in by_unit]
        rules = GhostOptimizerFactory(self.scene.tape, is_cpu=not self.scene.spec.is_for_cuda)
        update = RepeatedUpdate(groups, optimizer, layout, self.room, rules, target_rules)
        update.repeat = self._repeat
        if self.step.consumed:
            self.units.consume_with(lambda index: update.step_group(index, 0.0))
        return update

    def _first_step(self) -> None:
        """Run one step that is not counted, for the state that it leaves to the next step."""
        # The units must be entered in the order of forward: what a unit prefetches depends on it.
        numbers = [self._played[unit] for unit in self.scene.order(Mark.ENTER)]
        order = [number for number in numbers if number is not None] or range(len(self.used))
        for number in order:
            self.units.all[number].before_forward()
            self.units.all[number].after_forward()
        self.units.begin_pass(is_last=True)
        for unit in self.units.all[::-1]:
            unit.before_backward()
        self.units.end_pass(is_last=True)
        self.reduce()
        self.update(0)
        self.finish_update()

    def begin_passes(self) -> None:
        self.units.begin_passes()

    def end_pass(self) -> None:
        self.units.finish_reduction()

    def end_passes(self) -> None:
        self.units.end_passes()

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_last = is_last
        self.units.begin_pass(is_last=is_last)

    def begin_half(self, kind: Kind) -> None:
        self.half = kind
        self.units.begin_half(kind, is_last=self.is_last)

    def end_half(self, kind: Kind) -> None:
        self.half = None
        self.units.end_half(kind, is_last=self.is_last and kind is Kind.WEIGHT)

    def enter(self, unit: int) -> None:
        if (number := self._played[unit]) is not None:
            self.units.all[number].before_forward()

    def leave(self, unit: int) -> None:
        if (number := self._played[unit]) is not None:
            self.units.all[number].after_forward()

    def before_backward(self, unit: int) -> None:
        if (number := self._played[unit]) is not None:
            self.units.all[number].before_backward()

    def complete(self, gradient: Complete) -> None:
        number, index = self._place[gradient.parameter]
        self.members[number].accept_gradient(index, gradient)
        unit = self.units.all[number]
        # In the half of the weights torch runs no hooks of modules. `end_half` does their work.
        if self.half is not Kind.WEIGHT and isinstance(unit, UnitRuntime):
            unit.handle_gradient(index)

    def after_backward(self, unit: int) -> None:
        """End a unit's backward. With the root's backward, end the micro-batch too, unless it is in
        halves."""
        if (number := self._played[unit]) is not None:
            self.units.all[number].after_backward()
        if unit == self._root and self.half is None:
            self.end()

    def end(self) -> None:
        """End the micro-batch, including units left open by a parameter that had no part in the
        loss."""
        self.units.end_pass(is_last=self.is_last)

    def storages(self) -> Iterator[tuple[State, Ghost]]:
        """Yield the storages that are kept now, each with its state."""
        yield from self.units.storages()
        yield from self.update_of.storages()

    def gathered_bytes(self) -> int:
        return sum(
            times * part.whole.nbytes
            for unit, times in zip(self.units.all, self.times, strict=True)
            for part in unit.theta.parts
            if part.is_transient and part.is_gathered
        )

    def signature(self) -> Hashable:
        return self.units.signature(), self.is_last

    def reduce(self) -> None:
        if self.step.consumed:
            return
        self.units.for_update()
        if self._is_by_view and self.tape.is_reading:
            self.views = NormedViews(self._normed_units())
            differing = self.scene.plan.differing_axes
            self.kinds = self.views.shard_kinds(
                tuple((f.axis, f.degree) for f in self.scene.spec.factors if f.axis in differing)
            )
        if self.scene.plan.update.layout.scales_loss and self._on_device:
            self.tape.spike(SCALE_BYTES)

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return the kind of views in a shard. Everything else is equal in all shards."""
        return self.kinds[shard] if self._is_by_view and not self.step.consumed else 0

    def norm_groups(self, shard: int) -> list[list[int]] | None:
        """Return the elements of the gradients in each norm group, or None if they are not on the
        device.

        Norms are computed on the tier of the gradients. If that is not the device, only the scalar
        that is reduced is allocated on it.
        """
        if self.step.consumed:
            return None
        if self._is_by_view:
            clip = self.scene.plan.clip
            assert clip is not None, "whose norms are of views"
            return self.views.by_operator(self.kinds[shard], clip)
        if self._on_device:
            kept = [(state.gradients.kept, times) for state, times in self._normed_units()]
            return [[ghost.numel for ghost, times in kept if ghost for _ in range(times)]]
        step = self.scene.plan.clip
        if step is not None and step.axes:
            self.tape.spike(max(SCALE_BYTES, self.scene.plan.update.layout.gradients.itemsize))
        return None

    def _normed_units(self) -> Iterator[tuple[UnitState[Ghost], int]]:
        """Yield the units whose norms this rank computes, with the number of units that each
        represents.

        A tensor that is a copy, in a separate unit, is counted on another stage.
        """
        for unit, parts, times in zip(self.used, self.parts, self.times, strict=True):
            if parts.trained and not all(tensor.is_copy for tensor in unit.trained):
                yield parts.trained, times

    @property
    def _is_by_view(self) -> bool:
        """True if each view of the gradients has a separate norm."""
        return self._on_device and self.scene.plan.is_clipped_apart

    @property
    def _on_device(self) -> bool:
        return self.step.gradients_tier is Tier.DEVICE

    def update(self, shard: int) -> None:
        if not self.step.consumed:
            scale = GhostScale(self.tape) if self.scene.plan.update.layout.scales_loss else None
            self.update_of.step(0.0, scale)

    def finish_update(self) -> None:
        """Wait for the gathers that the update issued, and clear the gradients."""
        self.units.finish_update()
        self.units.clear_gradients()


def places_of(plan: Plan, units: Sequence[UnitFacts]) -> tuple[tuple[int, ...], ...]:
    """Return the places of the units that share a buffer."""
    return buckets_of(plan, [(unit.modules, unit.trained_numel) for unit in units])


def joined_units(plan: Plan, units: Sequence[UnitFacts]) -> list[UnitFacts]:
    """Return the units of a plan of flat units as they are reduced and updated."""
    return [_join_units([units[place] for place in bucket]) for bucket in places_of(plan, units)]


def _join_units(units: Sequence[UnitFacts]) -> UnitFacts:
    if len(units) == 1:
        return units[0]
    return UnitFacts(
        modules=tuple(name for unit in units for name in unit.modules),
        tensors=tuple(tensor for unit in units for tensor in unit.tensors),
    )


def flat_step_of(plan: Plan, unit: UnitFacts) -> FlatUnits:
    """Return the wrap of a unit in a plan of flat units."""
    step = plan.wrap_of(unit.modules)
    assert isinstance(step, FlatUnits), "without an axis flat units are flat units"
    return step


def cut_axes(step: FlatUnits) -> tuple[Axis, ...]:
    """Return the axes along which any state is sharded, in mesh order."""
    cut = {*step.parameters, *step.optimizer, *step.gradients}
    return tuple(axis for axis in step.axes if axis in cut)


def _run_each(act: Callable[[Any], None], items: Iterable[Any]) -> None:
    for item in items:
        act(item)
