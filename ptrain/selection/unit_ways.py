"""What the choices of the data axes do with the units of a model, as arrays: seconds of a unit, of
those that are alike in this once. Most dials choose when something is done with a unit, and not
what.

What the choices of the data axes say, one by one, whatever their degrees are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.form import (
    form_of,
    has,
    joins_units,
    reduces_in_backward,
    tier_of,
    when_gathered,
)
from ptrain.cost import State
from ptrain.selection.arrays import Array, Columns, by_value, distinct, numpy
from ptrain.selection.moves import PartedMoves, UnitMoves, inside
from ptrain.selection.profile import Sizes, Wires
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, UnitKind, UnitSize
from ptrain.spec.placement import CUT, Distribution, Factor, Tier
from ptrain.spec.rates import OperatorKind
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import BY_TENSOR, REPLICAS, Form

SUB_BLOCK, _BUCKET, _MODEL = 2, 3, 4  # of what is joined layers follow from the sizes
_OF_KIND = {
    UnitKind.BLOCK: 0,
    UnitKind.BLOCKS: 1,
    UnitKind.SUB_BLOCK: SUB_BLOCK,
    UnitKind.MODEL: _MODEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWay:
    """What one choice says, whatever its degrees are: `cut` by state which of its axes cut it."""

    choice: AxisChoice
    form: Form
    cut: dict[State, tuple[bool, ...]]
    near: dict[State, bool]
    is_on_file: bool  # Omega
    is_made: bool
    is_brought: bool
    is_late: bool
    said_unit: UnitSize | None
    unit: int
    keeps_forward: bool
    keeps_backward: bool
    overlaps: bool
    gathers_beside: bool  # the update of other units
    ahead: int
    is_copied_back: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOfTuples:
    """What tuples say by themselves, whatever the dials are; they have their form beside others."""

    factors: tuple[Factor, ...]
    form: Form
    cut: dict[State, tuple[bool, ...]]
    near: dict[State, bool]
    is_on_file: bool
    is_made: bool

    @classmethod
    def of(cls, spec: Spec, factors: tuple[Factor, ...]) -> FormOfTuples:
        """Return what those of some factors say that a spec has."""
        cut = {
            state: tuple(f.placement[state].distribution in CUT for f in factors)
            for state in (_THETA, _OMEGA, _GRADS)
        }
        return cls(
            factors=factors,
            form=form_of(spec),
            cut=cut,
            near={state: tier_of(factors, state) is Tier.DEVICE for state in cut},
            is_on_file=tier_of(factors, _OMEGA) is Tier.FILE,
            is_made=has(factors, _THETA, Distribution.MATERIALIZED),
        )


def ways_of(
    base: Spec, choices: Iterable[AxisChoice], beside: Sequence[AxisChoice]
) -> Iterator[DataWay]:
    """Yield what choices say beside others, which decide by which form they are executed."""
    said: FormOfTuples | None = None
    for choice in choices:
        spec = chosen(base, (choice, *beside))
        if said is None or said.factors is not choice.factors:
            said = FormOfTuples.of(spec, choice.factors)
        is_brought = said.is_made or any(said.cut[_THETA]) or not said.near[_THETA]
        unit = _BUCKET if joins_units(spec, said.form) else _OF_KIND[spec.unit_size.kind]
        ahead = (spec.prefetch or 0) if said.form is Form.FLAT else int(is_brought)
        yield DataWay(
            choice=choice,
            form=said.form,
            cut=said.cut,
            near=said.near,
            is_on_file=said.is_on_file,
            is_made=said.is_made,
            is_brought=is_brought,
            is_late=spec.sync.gradients is GradientSync.LAST,
            said_unit=spec.unit,
            unit=unit,
            keeps_forward=is_brought and not spec.sync.reshard_after_forward,
            keeps_backward=is_brought and not spec.sync.reshard_after_backward,
            overlaps=reduces_in_backward(spec, said.form, keeps_parts=any(said.cut[_GRADS])),
            gathers_beside=said.form is Form.FLAT
            and when_gathered(spec) is GatherAfterUpdate.DURING_UPDATE,
            ahead=0 if unit == _MODEL else ahead,
            is_copied_back=spec.offload.update is Tier.DEVICE,
        )


_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
_UNITS = (1.0, 2.0, 0.5)  # layers of a unit, that of a sub-block being half of one
_ISSUED = 1.5  # for each sub-block: the third unit of a block is its norms


def blocks_of_bucket(base: Spec, sizes: Sizes) -> int:
    """Return how many blocks are one where they join as long as a bucket has room."""
    block = sizes.block * base.precision.effective.reduced.itemsize
    return max(1, base.bucket_bytes // block)


class SharedUnits:
    """The unlike choices of several lists of choices: of lists that do the same with units, as
    beside schedules of two kinds, these are asked once."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self._known: dict[frozenset[object], tuple[UnitWays, dict[object, int]]] = {}

    def of(self, ways: Sequence[DataWay]) -> tuple[UnitWays, Array]:
        """Return the choices that are unlike, and which of these each choice is like."""
        keys = [
            (*way.cut.values(), way.form, way.is_made, way.is_brought, way.unit) for way in ways
        ]
        if (kinds := frozenset(keys)) not in self._known:
            unlike = dict(zip(keys, ways, strict=True))
            places: dict[object, int] = {key: place for place, key in enumerate(unlike)}
            self._known[kinds] = UnitWays(self.wires, [*unlike.values()]), places
        units, places = self._known[kinds]
        return units, numpy().array([places[key] for key in keys], dtype=int)


class UnitWays:
    """Choices over the same axes that are unlike in what is done with a unit."""

    def __init__(self, wires: Wires, unlike: Sequence[DataWay]) -> None:
        np = numpy()
        self.wires, self.layout = wires, wires.base.precision.effective
        self._known: dict[tuple[object, ...], Columns] = {}
        self.cut = {
            state: np.array([way.cut[state] for way in unlike], dtype=bool)
            for state in (_THETA, _OMEGA, _GRADS)
        }
        self.materialized = np.array([way.is_made for way in unlike], dtype=bool)
        self.brought = np.array([way.is_brought for way in unlike], dtype=bool)
        self.unit = np.array([way.unit for way in unlike], dtype=int)
        self.flat = np.array([way.form is Form.FLAT for way in unlike], dtype=bool)
        self.replicas = np.array([way.form in REPLICAS for way in unlike], dtype=bool)
        self.local = np.array([way.form is Form.LOCAL for way in unlike], dtype=bool)
        self.by_tensor = np.array([way.form in BY_TENSOR for way in unlike], dtype=bool)

    def row_shards(self, degrees: Sequence[int]) -> Array:
        """Return over how many ranks parameters are cut by rows; 1 where not tensor by tensor."""
        np = numpy()
        cut = np.where(self.cut[_THETA], np.array(degrees), 1).prod(axis=1)
        shards_made = np.where(self.materialized, degrees[-1] if degrees else 1, 1)
        return np.where(self.by_tensor, np.maximum(cut, shards_made), 1)

    def parts(self, degrees: Sequence[int]) -> dict[State, Array]:
        """Return into how many slices states are cut."""
        np = numpy()
        return {
            state: np.where(cut, np.array(degrees, dtype=float), 1.0).prod(axis=1)
            for state, cut in self.cut.items()
        }

    def columns(self, degrees: Sequence[int], sizes: Sizes, within: int, layers: int) -> Columns:
        """Return the coefficients of a rank that has about so many layers; `unit`: parameters of
        the largest unit, `moved` of one on average, `per_layer`: units of a layer.

        Seconds to `gather` and to `reduce` a unit, to copy it out of the one and into the other
        (`unpack`, `pack`), to `add` its gradients to those before, and to `fill` these with zeros,
        both (`…_end`) of a parameter around the blocks as well; to reduce a unit before it is
        updated (`finish`) and to gather it then (`spread`). Of a parameter to `update` it, in the
        blocks and around them (`update_end`). Experts that ranks have of their own are cut over
        the others alone: of these the innermost axis has the fewer.
        """
        key = tuple(degrees), sizes, within, layers
        if key not in self._known:
            self._known[key] = self._columns(degrees, sizes, within, layers)
        return self._known[key]

    def _columns(self, degrees: Sequence[int], sizes: Sizes, within: int, layers: int) -> Columns:
        np, layout = numpy(), self.layout
        held, reduced = layout.parameters.itemsize, layout.reduced.itemsize
        of_experts = inside(degrees, sizes.shared_by)
        parts = self.parts(degrees)
        times = parts[_OMEGA] / self.parts(of_experts)[_OMEGA]
        is_cut = parts[_GRADS] > 1
        moves = PartedMoves(
            UnitMoves(self, degrees, within),
            UnitMoves(self, of_experts, within * sizes.shared_by),
            sizes.own_experts / sizes.block,
        )
        per_unit = np.array(self._layers_of_units(sizes, layers))[self.unit]
        moved = sizes.block * per_unit  # of sub-blocks, which are unlike, the mean
        unit = np.where(self.unit == SUB_BLOCK, sizes.largest_part, moved)
        settled = moves.settle(moved * reduced)
        ends = sizes.front + sizes.behind
        return {
            "unit": unit.astype(float),
            "moved": moved.astype(float),
            "per_layer": 1 / per_unit,
            "add": self._added(per_unit, sizes.tensors),
            "add_end": self._added(np.ones(len(moved)), (ends,)) / ends,
            "fill": self._filled(moved * reduced),
            "fill_end": self._filled(float(ends) * np.ones(len(moved)) * reduced) / ends,
            "unpack": self._unpacked(moved, degrees),
            "pack": self._packed(moved, parts[_GRADS]),
            "gather": np.where(self.brought, moves.gather(moved * held), 0.0),
            "reduce": np.where(self.flat & ~is_cut, settled, moves.reduce(moved * reduced)),
            "finish": np.where(is_cut, settled, 0.0),
            "spread": moves.spread(moved * held),
            **self._issuing(degrees, moved * reduced, within, sizes),
            **self._updates(parts[_OMEGA], times, layers, sizes),
        }

    def _issuing(self, degrees: Sequence[int], moved: Array, within: int, sizes: Sizes) -> Columns:
        """Seconds of a host's that runs ahead, of a unit of so many bytes, of which experts are
        apart; what is in buckets is as many as it has bytes. Nothing where rates do not say it."""
        if not self.wires.is_issued:
            return {}
        np, seconds = numpy(), UnitMoves(self, degrees, within).issuing(moved)
        seconds["issue_gather"] = np.where(self.brought, seconds["issue_gather"], 0.0)
        parts = np.where(self.unit == SUB_BLOCK, _ISSUED, 1.0) * (2 if sizes.own_experts else 1)
        issuing = {name: parts * taken for name, taken in seconds.items()}
        return issuing | {"is_in_buckets": self.replicas.astype(float)}

    def _layers_of_units(self, sizes: Sizes, layers: int) -> tuple[float, ...]:
        """Return the layers of a unit by its kind."""
        filled = blocks_of_bucket(self.wires.base, sizes)
        return (*_UNITS, float(min(filled, layers)), float(layers))

    def _added(self, times: Array, tensors: Sequence[int]) -> Array:
        """Seconds of the sum of a unit's gradients and those of the micro-batches before, tensor by
        tensor: read twice and written."""
        np, held = numpy(), self.layout.parameters.itemsize
        return times * self._of_bytes(OperatorKind.POINTWISE, 3 * held * np.array(tensors)).sum()

    def _filled(self, sizes: Array) -> Array:
        """Seconds of the zeros that a flat unit's gradients begin as, whenever it was reduced."""
        return self.flat * self._of_bytes(OperatorKind.POINTWISE, sizes)

    def _unpacked(self, moved: Array, degrees: Sequence[int]) -> Array:
        """Seconds of a unit that has been gathered: tensor by tensor it is copied apart. A flat one
        is made of a master copy's shard, and is put in order where it came over several axes."""
        np, layout = numpy(), self.layout
        master = layout.master or layout.parameters
        shard = moved / np.where(self.cut[_OMEGA], np.array(degrees, dtype=float), 1.0).prod(axis=1)
        cast = self._of_bytes(
            OperatorKind.COPY, shard * (master.itemsize + layout.parameters.itemsize)
        )
        whole = self._copied_within(moved * layout.parameters.itemsize)
        over = np.where(self.materialized[:, None], self.cut[_OMEGA], self.cut[_THETA])
        flat = self.materialized * cast + (over.sum(axis=1) > 1) * whole
        return self.brought * np.where(self.by_tensor, whole, flat)

    def _packed(self, moved: Array, parts: Array) -> Array:
        """Seconds of a unit's gradients that are reduced: tensor by tensor they are copied together
        before. Behind, the shard of a flat unit is added to what is kept."""
        np, size = numpy(), self.layout.reduced.itemsize
        copied = self._copied_within(moved * size)
        added = self._of_bytes(OperatorKind.POINTWISE, 3 * moved * size / parts)
        return np.where(self.by_tensor, copied, np.where(self.flat & (parts > 1), added, 0.0))

    def _copied_within(self, sizes: Array) -> Array:
        """Seconds in which so many bytes are copied on the device: read and written."""
        return self._of_bytes(OperatorKind.COPY, 2 * sizes)

    def _of_bytes(self, kind: OperatorKind, sizes: Array) -> Array:
        return by_value(sizes, partial(self.wires.operator_seconds, kind))

    def _updates(self, parts: Array, times: Array, layers: int, sizes: Sizes) -> Columns:
        """Of a parameter, of which experts have so many times as large a part. Flat units are
        updated one after the other, tensors all at once."""
        more = 1 + (times - 1) * sizes.experts / sizes.block
        np, ends = numpy(), sizes.front + sizes.behind
        blocks, tensors = layers * sizes.block, layers * len(sizes.tensors)
        values, where = distinct(parts)
        units = [sizes.block * number for number in self._layers_of_units(sizes, layers)]
        at_once = self._updated(blocks, tensors, values)
        beside = self._updated(blocks + ends, tensors + 1, values) - at_once
        alone = self._updated(ends, 1, values)
        by_unit = np.array([self._updated(unit, 1, values) / unit for unit in units])
        return {
            "update": more
            * np.where(self.flat, by_unit[self.unit, where], at_once[where] / blocks),
            "update_end": np.where(self.flat, alone[where], beside[where]) / ends,
        }

    def _updated(self, elements: float, tensors: int, parts: Sequence[float]) -> Array:
        """Seconds of one update of so many elements, by the number of slices they are cut into."""
        slices = [max(1, int(elements / part)) for part in parts]
        return numpy().array([self.wires.update_seconds(number, tensors) for number in slices])
