"""The choices of the data axes as arrays: coefficients of bytes and seconds, by which a search
scores them for one rank's part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.form import BY_TENSOR, Form, form_of, has, tier_of
from ptrain.costs import Collective, State
from ptrain.derivation.optimizer_state import optimizer_itemsize
from ptrain.facts.operators import Operator
from ptrain.rates.pace import Pace
from ptrain.selection.arrays import numpy
from ptrain.selection.profile import Sizes, nodes_of
from ptrain.spec.dials import GradientSync, Overlap, UnitKind, UnitSize
from ptrain.spec.placement import CUT, Distribution, Tier
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.spec import Spec

Array = Any
Columns = dict[str, Array]
_BUCKET = 25 * 2**20  # bytes that DistributedDataParallel reduces at once
_COPIED = 2**24  # bytes by which the pace of copies between tiers is asked
_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
_UNITS = (1.0, 2.0, 0.5)  # layers of a unit, that of a sub-block being half of one
_REPLICAS = (Form.REPLICATE, Form.SPREAD_UPDATE)


@dataclass(frozen=True)
class Wires:
    """Seconds of what ranks send each other on a cluster, asked once each; `is_nominal`: they are
    none that anybody measured."""

    base: Spec
    pace: Pace
    is_nominal: bool = False

    @cached_property
    def _known(self) -> dict[tuple[Collective, int, int, int], float]:
        return {}

    def seconds(self, collective: Collective, ranks: int, stride: int, payload: float) -> float:
        """Return the seconds of a collective over ranks that are `stride` apart."""
        if ranks == 1 or not payload:
            return 0.0
        nodes = nodes_of(self.base, ranks, stride)
        key = (collective, ranks, nodes, int(payload))
        if key not in self._known:
            self._known[key] = self.pace.collective_seconds(
                collective, ranks=ranks, nodes=nodes, payload=int(payload)
            )
        return self._known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWay:
    """What one choice says, whatever its degrees are: `cut` by state which of its axes cut it."""

    choice: AxisChoice
    form: Form
    cut: dict[State, tuple[bool, ...]]
    near: dict[State, bool]
    is_made: bool
    is_brought: bool
    is_late: bool
    said_unit: UnitSize
    unit: int
    keeps_forward: bool
    keeps_backward: bool
    overlaps: bool
    ahead: int
    is_copied_back: bool


def way_of(base: Spec, choice: AxisChoice, beside: Sequence[AxisChoice]) -> DataWay:
    """Return what a choice says beside others, which decide by which form it is executed."""
    spec = chosen(base, (choice, *beside))
    form, factors = form_of(spec), choice.factors
    cut = {
        state: tuple(f.placement[state].distribution in CUT for f in factors)
        for state in (_THETA, _OMEGA, _GRADS)
    }
    near = {state: tier_of(factors, state) is Tier.DEVICE for state in cut}
    is_made = has(factors, _THETA, Distribution.MATERIALIZED)
    is_brought = is_made or any(cut[_THETA]) or not near[_THETA]
    is_flat = form is Form.FLAT
    kind = spec.unit.kind
    return DataWay(
        choice=choice,
        form=form,
        cut=cut,
        near=near,
        is_made=is_made,
        is_brought=is_brought,
        is_late=spec.sync.gradients is GradientSync.LAST,
        said_unit=spec.unit,
        unit=2 if kind is UnitKind.SUB_BLOCK else int(kind is UnitKind.BLOCKS),
        keeps_forward=is_brought and not spec.sync.reshard_after_forward,
        keeps_backward=is_brought and not spec.sync.reshard_after_backward,
        overlaps=spec.overlap is Overlap.BACKWARD if is_flat else spec.overlap is not Overlap.NONE,
        ahead=(spec.prefetch or 0) if is_flat else int(is_brought),
        is_copied_back=spec.offload.update is Tier.DEVICE,
    )


class Ways:
    """Choices over the same axes that are legal beside the same other choices, as arrays."""

    def __init__(self, wires: Wires, ways: Sequence[DataWay]) -> None:
        np = numpy()
        self.wires, self.ways = wires, ways
        self.layout = wires.base.precision.effective
        self.cut = {
            state: np.array([way.cut[state] for way in ways], dtype=bool)
            for state in (_THETA, _OMEGA, _GRADS)
        }
        self.materialized = np.array([way.is_made for way in ways])
        self.brought = np.array([way.is_brought for way in ways])
        self.unit = np.array([way.unit for way in ways])
        self.flat = np.array([way.form is Form.FLAT for way in ways])
        self.replicas = np.array([way.form in _REPLICAS for way in ways])
        self.local = np.array([way.form is Form.LOCAL for way in ways])
        self.by_tensor = np.array([way.form in BY_TENSOR for way in ways])
        self.near = {state: np.array([way.near[state] for way in ways]) for state in self.cut}
        self.fixed = {
            name: np.array([float(getattr(way, name)) for way in ways])
            for name in ("is_late", "keeps_forward", "keeps_backward", "ahead")
        }
        self.overlaps = np.array([float(way.overlaps) for way in ways]) * wires.pace.overlaps
        self.back = np.array([way.is_copied_back for way in ways])

    def choice(self, index: int, degrees: Sequence[int]) -> AxisChoice:
        """Return a choice with its degrees."""
        way = self.ways[index].choice
        factors = zip(way.factors, degrees, strict=True)
        return replace(way, factors=tuple(replace(f, degree=d) for f, d in factors))

    def of_units(self, units: frozenset[UnitSize]) -> Array:
        """Return which of them move one of these units."""
        return numpy().array([way.said_unit in units for way in self.ways], dtype=bool)

    def row_shards(self, degrees: Sequence[int]) -> Array:
        """Return over how many ranks parameters are cut by rows; 1 where not tensor by tensor."""
        np = numpy()
        cut = np.where(self.cut[_THETA], np.array(degrees), 1).prod(axis=1)
        shards_made = np.where(self.materialized, degrees[-1] if degrees else 1, 1)
        return np.where(self.by_tensor, np.maximum(cut, shards_made), 1)

    def columns(self, degrees: Sequence[int], sizes: Sizes, within: int) -> Columns:
        """Return the coefficients. Bytes per parameter that a rank has: `theta` and `omega` between
        steps, `grads` when backward is over, `unreduced` before the last micro-batch of what is
        reduced then, `whole` of a unit that is gathered, `opened` of a unit's gradients while they
        arrive, `flying` while they are reduced; `ahead` units are gathered ahead. `unit`:
        parameters of the largest unit, `moved` of one on average, `per_layer`: units of a layer.
        Seconds to `gather` and to `reduce` a unit, to copy it out of the one and into the other
        (`unpack`, `pack`), to `add` its gradients to those before (flat
        units do so with the first, too: `adds_first`), to make it whole again when it is updated
        (`finish`), and of a parameter's `update`, copies between tiers included."""
        np = numpy()
        layout, base = self.layout, self.wires.base
        held, reduced = layout.parameters.itemsize, layout.reduced.itemsize
        parts = {
            state: np.where(cut, np.array(degrees, dtype=float), 1.0).prod(axis=1)
            for state, cut in self.cut.items()
        }
        state = optimizer_itemsize(base.optimizer, layout)
        is_cut = parts[_GRADS] > 1
        moves = _Moves(self, degrees, within)
        layers = np.array(_UNITS)[self.unit]
        moved = sizes.block * layers  # of sub-blocks, which are unlike, the mean
        unit = np.where(self.unit == 2, sizes.largest_part, moved)
        near = self.near
        return {
            **self.fixed,
            "overlaps": self.overlaps,
            "adds_first": self.flat.astype(float),
            "theta": np.where(self.materialized | ~near[_THETA], 0.0, held / parts[_THETA]),
            "omega": np.where(near[_OMEGA], state / parts[_OMEGA], 0.0),
            "grads": np.where(near[_GRADS], layout.gradients.itemsize / parts[_GRADS], 0.0),
            "unreduced": np.where(is_cut & (self.fixed["is_late"] > 0), float(reduced), 0.0),
            "whole": np.where(self.brought, float(held), 0.0),
            "opened": np.where(~self.flat & is_cut, float(held), 0.0),
            "flying": np.where(is_cut | self.flat, float(reduced), 0.0),
            "unit": unit.astype(float),
            "moved": moved.astype(float),
            "per_layer": 1 / layers,
            "add": self._added(moved * held),
            "unpack": np.where(
                self.by_tensor & self.brought, self._copied_within(moved * held), 0.0
            ),
            "pack": np.where(self.by_tensor, self._copied_within(moved * reduced), 0.0),
            "gather": np.where(self.brought, moves.gather(moved * held), 0.0),
            "reduce": moves.reduce(moved * reduced),
            "finish": moves.finish(moved * held),
            "update": self._update(parts[_OMEGA], sizes) + self._copied(parts, state, held),
        }

    def _added(self, sizes: Array) -> Array:
        """Seconds of the sum of a unit's gradient and that of the micro-batches before: read twice
        and written. Of what is reduced after each there is none, but for flat units, which are
        filled with zeros then."""
        np = numpy()
        is_late = self.fixed["is_late"] > 0
        sums = self._of_bytes(OperatorKind.POINTWISE, np.where(is_late, 3, 4) * sizes)
        return np.where(self.by_tensor & ~is_late, 0.0, sums)

    def _copied_within(self, sizes: Array) -> Array:
        """Seconds in which so many bytes are copied on the device: read and written."""
        return self._of_bytes(OperatorKind.COPY, 2 * sizes)

    def _of_bytes(self, kind: OperatorKind, sizes: Array) -> Array:
        np, pace, dtype = numpy(), self.wires.pace, self.layout.parameters
        values, where = np.unique(sizes, return_inverse=True)
        seconds = [pace.operator_seconds(Operator(kind, dtype, (int(value),))) for value in values]
        return np.array(seconds)[where.reshape(-1)]

    def _update(self, parts: Array, sizes: Sizes) -> Array:
        np, base = numpy(), self.wires.base
        values, where = np.unique(parts, return_inverse=True)
        seconds = [
            self.wires.pace.update_seconds(
                base.optimizer.name,
                self.layout,
                elements=max(1, int(sizes.block / part)),
                tensors=sizes.tensors,
            )
            / sizes.block
            for part in values
        ]
        return np.array(seconds)[where.reshape(-1)]

    def _copied(self, parts: dict[State, Array], state: int, held: int) -> Array:
        """Of a parameter: state that is updated on the device goes there and back. How long a host
        takes for an update nobody measures: that is endless."""
        np = numpy()
        near = self.near[_OMEGA]
        if near.all():
            return 0.0
        down, up = (
            self.wires.pace.copy_seconds(copy, _COPIED) / _COPIED
            for copy in (Collective.DEVICE_TO_HOST, Collective.HOST_TO_DEVICE)
        )
        there = state / parts[_OMEGA] * (down + up)
        on_host = held / parts[_OMEGA] * (down + up) if self.wires.is_nominal else np.inf
        return np.where(near, 0.0, np.where(self.back, there, on_host))


class _Moves:
    """Seconds in which units of so many bytes are moved over the data axes: innermost the shards,
    which are `within` ranks apart, around them the copies."""

    def __init__(self, ways: Ways, degrees: Sequence[int], within: int) -> None:
        self.ways, self.degrees = ways, degrees
        self.strides = [within * prod(degrees[at + 1 :]) for at in range(len(degrees))]

    def _over(self, collective: Collective, at: int, sizes: Array) -> Array:
        """Seconds over one axis, of each size."""
        np, wires = numpy(), self.ways.wires
        values, where = np.unique(sizes, return_inverse=True)
        seconds = [
            wires.seconds(collective, self.degrees[at], self.strides[at], value) for value in values
        ]
        return np.array(seconds)[where.reshape(-1)]

    def _hook(self, flat: Hook, other: Hook) -> Array:
        """Seconds of the host's, which runs ahead where the device computes by itself."""
        pace = self.ways.wires.pace
        if pace.overlaps:
            return 0.0
        return numpy().where(self.ways.flat, pace.hook_seconds(flat), pace.hook_seconds(other))

    def gather(self, sizes: Array) -> Array:
        ways, total = self.ways, self._hook(Hook.FLAT_GATHER, Hook.FSDP2_GATHER)
        for at in range(len(self.degrees)):
            is_made = ways.materialized & ways.cut[_OMEGA][:, at]
            total = total + self._over(Collective.ALL_GATHER, at, sizes) * (
                ways.cut[_THETA][:, at] | is_made
            )
        return total

    def reduce(self, sizes: Array) -> Array:
        """Shards first: what copies sum then is a shard. DDP reduces by bucket."""
        np, ways = numpy(), self.ways
        if not self.degrees:
            return np.zeros(len(sizes))
        pace = ways.wires.pace
        hook = 0.0 if pace.overlaps else pace.hook_seconds(Hook.DDP_BUCKET)
        pieces = np.maximum(1.0, sizes / _BUCKET)
        buckets = pieces * (hook + self._over(Collective.ALL_REDUCE, 0, sizes / pieces))
        total = self._hook(Hook.FLAT_REDUCE, Hook.FSDP2_REDUCE)
        for at in reversed(range(len(self.degrees))):
            cut = ways.cut[_GRADS][:, at] | ways.cut[_OMEGA][:, at]
            scattered = self._over(Collective.REDUCE_SCATTER, at, sizes)
            total = total + np.where(cut, scattered, self._over(Collective.ALL_REDUCE, at, sizes))
            sizes = np.where(cut, sizes / self.degrees[at], sizes)
        return np.where(ways.local, 0.0, np.where(ways.replicas, buckets, total))

    def finish(self, sizes: Array) -> Array:
        """What is gathered after the update: Theta that is whole where Omega is a slice."""
        ways, total = self.ways, numpy().zeros(len(sizes))
        for at in range(len(self.degrees)):
            spread = ways.cut[_OMEGA][:, at] & ~ways.cut[_THETA][:, at] & ~ways.materialized
            total = total + self._over(Collective.ALL_GATHER, at, sizes) * spread
        return total
