"""What a choice of the data axes means to a search in closed form: coefficients of bytes and of
seconds, for one rank's part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.form import Form, form_of, has, tier_of
from ptrain.costs import Collective, State
from ptrain.derivation.optimizer_state import optimizer_itemsize
from ptrain.rates.pace import Hook, Pace
from ptrain.selection.profile import Sizes, nodes_of
from ptrain.spec.axis import DATA_AXES, Factor
from ptrain.spec.dials import GradientSync, Overlap, UnitKind
from ptrain.spec.placement import CUT, Distribution, Tier
from ptrain.spec.spec import Spec

_BUCKET = 25 * 2**20  # bytes that DistributedDataParallel reduces at once


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """Bytes per parameter that a rank has: `theta` and `omega` between steps, `grads` when
    backward is over, `unreduced` before the last micro-batch of what is reduced then. `whole`: of a
    gathered unit, 0 where nothing is gathered; `opened`: of a unit's gradients while they arrive,
    `flying` while they are reduced. `ahead`: units that are gathered ahead. Numbers of a unit are
    `unit`, its parameters, and `per_layer`, units of a layer.

    Seconds: to `gather` and to `reduce` a unit, to `finish` a parameter that is whole again after
    its update (of a unit), `update` of a parameter, `copy` of a parameter's states between tiers.
    `of_root` scales a unit's seconds to those of a parameter of the root.
    """

    theta: float
    omega: float
    grads: float
    unreduced: float
    whole: float
    opened: float
    flying: float
    ahead: float
    unit: float
    per_layer: float
    is_late: bool
    keeps_forward: bool
    keeps_backward: bool
    overlaps: bool
    gather: float
    reduce: float
    finish: float
    update: float
    copy: float

    @classmethod
    def names(cls) -> Sequence[str]:
        """Return the names of the columns."""
        return [spot.name for spot in fields(cls)]


@dataclass(frozen=True)
class Machine:
    """Seconds of what ranks send each other on a cluster, asked once each."""

    base: Spec
    pace: Pace

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

    def send(self, nodes: int, size: int) -> float:
        """Return the seconds of a send between two ranks on one node or two."""
        key = (Collective.SEND, 2, nodes, size)
        if key not in self._known:
            self._known[key] = self.pace.collective_seconds(
                Collective.SEND, ranks=2, nodes=nodes, payload=size
            )
        return self._known[key]


def row_of(machine: Machine, choice: AxisChoice, sizes: Sizes, within: int, form: Form) -> DataRow:
    """Return the coefficients of a choice; `within`: ranks inside the data axes' groups; `form`
    executes it."""
    spec = chosen(machine.base, (choice,))
    factors, layout = spec.factors, spec.precision.effective
    reduced, kept = layout.reduced.itemsize, layout.gradients.itemsize
    state = {which: _Share.of(factors, which) for which in (_THETA, _OMEGA, _GRADS)}
    theta, omega, grads = state[_THETA], state[_OMEGA], state[_GRADS]
    held = layout.parameters.itemsize
    is_made = has(factors, _THETA, Distribution.MATERIALIZED)
    is_brought = is_made or theta.is_gathered or not theta.is_near
    unit, per_layer = _unit(spec, sizes)
    is_late = spec.sync.gradients is GradientSync.LAST
    is_flat = form is Form.FLAT
    overlaps = spec.overlap is Overlap.BACKWARD if is_flat else spec.overlap is not Overlap.NONE
    seconds = _Moves(machine, factors, within)
    per_parameter = optimizer_itemsize(spec.optimizer, layout)
    return DataRow(
        theta=0.0 if is_made or not theta.is_near else held / theta.parts,
        omega=per_parameter / omega.parts if omega.is_near else 0.0,
        grads=kept / grads.parts if grads.is_near else 0.0,
        unreduced=float(reduced) if is_late and grads.parts > 1 else 0.0,
        whole=float(held) if is_brought else 0.0,
        opened=float(held if not is_flat and grads.parts > 1 else 0),
        flying=float(reduced) if grads.parts > 1 or is_flat else 0.0,
        ahead=float(spec.prefetch or 0) if is_flat else 1.0 * is_brought,
        unit=float(unit),
        per_layer=per_layer,
        is_late=is_late,
        keeps_forward=is_brought and not spec.sync.reshard_after_forward,
        keeps_backward=is_brought and not spec.sync.reshard_after_backward,
        overlaps=overlaps and machine.pace.overlaps,
        gather=seconds.gather(unit * held, form) if is_brought else 0.0,
        reduce=seconds.reduce(unit * reduced, form),
        finish=seconds.finish(unit * held),
        update=machine.pace.update_seconds(
            spec.optimizer.name,
            layout,
            elements=max(1, sizes.block // omega.parts),
            tensors=sizes.tensors,
        )
        / sizes.block,
        copy=seconds.copied(spec, per_parameter / omega.parts, held / theta.parts),
    )


_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """Into how many parts a state is cut, whether it is gathered for use, and whether it is on the
    device."""

    parts: int
    is_gathered: bool
    is_near: bool

    @classmethod
    def of(cls, factors: Sequence[Factor], state: State) -> _Share:
        cut = [f.degree for f in factors if f.placement[state].distribution in CUT]
        return cls(
            parts=prod(cut),
            is_gathered=has(tuple(factors), state, Distribution.GATHERED),
            is_near=tier_of(tuple(factors), state) is Tier.DEVICE,
        )


def _unit(spec: Spec, sizes: Sizes) -> tuple[int, float]:
    """Parameters of a unit, and units of a layer; of one cut into sub-blocks the largest's."""
    match spec.unit.kind:
        case UnitKind.SUB_BLOCK:
            return sizes.largest_part, 2.0
        case _:
            return sizes.block * spec.unit.count, 1 / spec.unit.count


class _Moves:
    """Seconds in which a unit of so many bytes is moved over the data axes: innermost the shards,
    which are `within` ranks apart, around them the copies."""

    def __init__(self, machine: Machine, factors: Sequence[Factor], within: int) -> None:
        self.machine, self.factors = machine, tuple(factors)
        self.strides: dict[object, int] = {}
        stride = within
        for axis in reversed(DATA_AXES):
            self.strides[axis] = stride
            stride *= next((f.degree for f in factors if f.axis is axis), 1)

    def _over(self, collective: Collective, factor: Factor, size: float) -> float:
        stride = self.strides[factor.axis]
        return self.machine.seconds(collective, factor.degree, stride, size)

    def gather(self, size: float, form: Form) -> float:
        hook = Hook.FLAT_GATHER if form is Form.FLAT else Hook.FSDP2_GATHER
        total = self.machine.pace.hook_seconds(hook)
        for factor in self.factors:
            if factor.placement.parameters.distribution in (*CUT, Distribution.MATERIALIZED):
                total += self._over(Collective.ALL_GATHER, factor, size)
        return total

    def reduce(self, size: float, form: Form) -> float:
        """Shards first: what copies sum then is a shard."""
        if form is Form.LOCAL:
            return 0.0
        if form in (Form.REPLICATE, Form.SPREAD_UPDATE):
            pieces = max(1.0, size / _BUCKET)
            hook = self.machine.pace.hook_seconds(Hook.DDP_BUCKET)
            (factor, *_) = self.factors
            return pieces * (hook + self._over(Collective.ALL_REDUCE, factor, size / pieces))
        hook = Hook.FLAT_REDUCE if form is Form.FLAT else Hook.FSDP2_REDUCE
        total = self.machine.pace.hook_seconds(hook)
        for factor in reversed(self.factors):
            placement = factor.placement
            is_cut = placement.gradients.distribution in CUT
            is_cut = is_cut or placement.optimizer.distribution is Distribution.SHARDED
            if is_cut:
                total += self._over(Collective.REDUCE_SCATTER, factor, size)
                size /= factor.degree
            else:
                total += self._over(Collective.ALL_REDUCE, factor, size)
        return total

    def finish(self, size: float) -> float:
        """What is gathered after the update: Theta that is whole where Omega is a slice."""
        total = 0.0
        for factor in self.factors:
            placement = factor.placement
            is_whole = placement.parameters.distribution is Distribution.REPLICATED
            if is_whole and placement.optimizer.distribution is Distribution.SHARDED:
                total += self._over(Collective.ALL_GATHER, factor, size)
        return total

    def copied(self, spec: Spec, omega: float, theta: float) -> float:
        """Of a parameter: state that is updated on the device goes there and back, of what is
        updated on the host the gradient goes and the parameter comes."""
        size = 2**24
        down, up = (
            self.machine.pace.copy_seconds(copy, size) / size
            for copy in (Collective.DEVICE_TO_HOST, Collective.HOST_TO_DEVICE)
        )
        if tier_of(self.factors, _OMEGA) is Tier.DEVICE:
            return 0.0
        if spec.offload.update is Tier.DEVICE:
            return omega * (down + up)
        return theta * (down + up)


def columns(rows: Sequence[DataRow]) -> dict[str, list[float]]:
    """Return the rows by column."""
    return {name: [float(getattr(row, name)) for row in rows] for name in DataRow.names()}


def forms_of(base: Spec, choices: Sequence[AxisChoice]) -> Form:
    """Return the form that executes what these choices make of the spec."""
    return form_of(chosen(base, choices))
