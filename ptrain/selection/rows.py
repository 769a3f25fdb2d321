"""The choices of the data axes as arrays: coefficients of bytes and seconds, by which a search
scores them for one rank's part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.form import (
    BY_TENSOR,
    REPLICAS,
    Form,
    form_of,
    has,
    joins_units,
    reduces_in_backward,
    tier_of,
    when_gathered,
)
from ptrain.costs import State
from ptrain.derivation.optimizer_state import optimizer_itemsize
from ptrain.selection.arrays import by_value, distinct, numpy
from ptrain.selection.moves import PartedMoves, UnitMoves, inside
from ptrain.selection.profile import Sizes
from ptrain.selection.wires import Wires
from ptrain.spec.axis import Factor
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, UnitKind, UnitSize
from ptrain.spec.placement import CUT, Distribution, Tier
from ptrain.spec.rates import OperatorKind
from ptrain.spec.spec import Spec

Array = Any
Columns = dict[str, Array]
_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
_UNITS = (1.0, 2.0, 0.5)  # layers of a unit, that of a sub-block being half of one
_SUB_BLOCK, _BUCKET, _MODEL = 2, 3, 4  # of what is joined layers follow from the sizes
_OF_KIND = {
    UnitKind.BLOCK: 0,
    UnitKind.BLOCKS: 1,
    UnitKind.SUB_BLOCK: _SUB_BLOCK,
    UnitKind.MODEL: _MODEL,
}
_ISSUED = 1.5  # for each sub-block: the third unit of a block is its norms
# Columns that say how many bytes a rank has.
OF_MEMORY = (
    *("theta", "omega", "grads", "reduced", "unreduced", "whole", "opened", "flying", "unit"),
    *("outputs", "is_cast", "is_late", "adds_first", "ahead", "keeps_forward", "keeps_backward"),
    *("lives_of_experts", "grads_of_experts"),
)
# And those that say how long it is busy.
OF_TIME = (
    *("per_layer", "moved", "keeps_forward", "keeps_backward", "is_late", "gather", "reduce"),
    *("overlaps", "ahead", "unpack", "pack", "add", "add_end", "adds_first", "fill", "fill_end"),
    *("update", "update_end", "copied", "finish", "spread", "spread_beside"),
)
# And those that say how long its host issues what it sends.
OF_ISSUE = ("issue_gather", "issue_reduce", "issue_settled", "is_in_buckets")


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


def blocks_of_bucket(base: Spec, sizes: Sizes) -> int:
    """Return how many blocks are one where they join as long as a bucket has room."""
    block = sizes.block * base.precision.effective.reduced.itemsize
    return max(1, base.bucket_bytes // block)


class Ways:
    """Choices over the same axes that are legal beside the same other choices, as arrays."""

    def __init__(self, wires: Wires, ways: Sequence[DataWay]) -> None:
        np = numpy()
        self.wires, self.ways = wires, ways
        self._of_units: dict[frozenset[UnitSize | None], Array] = {}
        self.layout = wires.base.precision.effective
        self.cut = {
            state: np.array([way.cut[state] for way in ways], dtype=bool)
            for state in (_THETA, _OMEGA, _GRADS)
        }
        self.materialized = np.array([way.is_made for way in ways])
        self.brought = np.array([way.is_brought for way in ways])
        self.unit = np.array([way.unit for way in ways])
        self.flat = np.array([way.form is Form.FLAT for way in ways])
        self.replicas = np.array([way.form in REPLICAS for way in ways])
        self.local = np.array([way.form is Form.LOCAL for way in ways])
        self.by_tensor = np.array([way.form in BY_TENSOR for way in ways])
        self.sums_copies = np.array([not all(way.cut[_GRADS]) for way in ways])
        self.near = {state: np.array([way.near[state] for way in ways]) for state in self.cut}
        self.fixed = {
            name: np.array([float(getattr(way, name)) for way in ways])
            for name in ("is_late", "keeps_forward", "keeps_backward", "ahead")
        }
        self.overlaps = np.array([float(way.overlaps) for way in ways]) * wires.pace.overlaps
        beside = np.array([float(way.gathers_beside) for way in ways])
        self.gathers_beside = beside * wires.pace.overlaps
        self.on_file = np.array([way.is_on_file for way in ways])
        self.back = np.array([way.is_copied_back for way in ways])

    def choice(self, index: int, degrees: Sequence[int]) -> AxisChoice:
        """Return a choice with its degrees."""
        way = self.ways[index].choice
        factors = zip(way.factors, degrees, strict=True)
        return replace(way, factors=tuple(replace(f, degree=d) for f, d in factors))

    def of_units(self, units: frozenset[UnitSize | None]) -> Array:
        """Return which of them move one of these units."""
        if units not in self._of_units:
            said = {id(way.said_unit): way.said_unit in units for way in self.ways}
            fine = [said[id(way.said_unit)] for way in self.ways]
            self._of_units[units] = numpy().array(fine, dtype=bool)
        return self._of_units[units].copy()

    def row_shards(self, degrees: Sequence[int]) -> Array:
        """Return over how many ranks parameters are cut by rows; 1 where not tensor by tensor."""
        np = numpy()
        cut = np.where(self.cut[_THETA], np.array(degrees), 1).prod(axis=1)
        shards_made = np.where(self.materialized, degrees[-1] if degrees else 1, 1)
        return np.where(self.by_tensor, np.maximum(cut, shards_made), 1)

    def columns(self, degrees: Sequence[int], sizes: Sizes, within: int, layers: int) -> Columns:
        """Return the coefficients, of a rank that has about so many layers: bytes (`_bytes`) of so
        many units and parameters; `unit`: parameters of the largest unit, `moved` of one on
        average, `per_layer`: units of a layer.

        Seconds to `gather` and to `reduce` a unit, to copy it out of the one and into the other
        (`unpack`, `pack`), to `add` its gradients to those before, which flat units do with the
        first, too (`adds_first`), and to `fill` these with zeros, both (`…_end`) of a parameter
        around the blocks as well; to reduce a unit before it is updated (`finish`) and to gather it
        then (`spread`), which goes on beside the update of those behind it (`spread_beside`). Of a
        parameter to `update` it, in the blocks and around them (`update_end`), and to be `copied`
        between tiers then. Experts that ranks have of their own are cut over the others alone: of
        these the innermost axis has the fewer.
        """
        np = numpy()
        layout, base = self.layout, self.wires.base
        held, reduced = layout.parameters.itemsize, layout.reduced.itemsize
        of_experts = inside(degrees, sizes.shared_by)
        parts, fewer = self._parts(degrees), self._parts(of_experts)
        times = {state: part / fewer[state] for state, part in parts.items()}
        state = optimizer_itemsize(base.optimizer, layout)
        is_cut = parts[_GRADS] > 1
        moves = PartedMoves(
            UnitMoves(self, degrees, within),
            UnitMoves(self, of_experts, within * sizes.shared_by),
            sizes.own_experts / sizes.block,
        )
        per_unit = np.array(self._layers_of_units(sizes, layers))[self.unit]
        moved = sizes.block * per_unit  # of sub-blocks, which are unlike, the mean
        unit = np.where(self.unit == _SUB_BLOCK, sizes.largest_part, moved)
        settled = moves.settle(moved * reduced)
        ends = sizes.front + sizes.behind
        return {
            **self.fixed,
            "overlaps": self.overlaps,
            "adds_first": self.flat.astype(float),
            **(memory := self._bytes(parts)),
            "lives_of_experts": memory["theta"] * times[_THETA] + memory["omega"] * times[_OMEGA],
            "grads_of_experts": memory["grads"] * times[_GRADS],
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
            "spread_beside": self.gathers_beside,
            **self._issuing(degrees, moved * reduced, within, sizes),
            **self._updates(parts[_OMEGA], times[_OMEGA], layers, sizes),
            "copied": self._copied(parts, state, held) + np.zeros(len(moved)),
        }

    def _issuing(self, degrees: Sequence[int], moved: Array, within: int, sizes: Sizes) -> Columns:
        """Seconds of a host's that runs ahead, of a unit of so many bytes, of which experts are
        apart; what is in buckets is as many as it has bytes. Nothing where rates do not say it."""
        if not self.wires.is_issued:
            return {}
        np, seconds = numpy(), UnitMoves(self, degrees, within).issuing(moved)
        seconds["issue_gather"] = np.where(self.brought, seconds["issue_gather"], 0.0)
        parts = np.where(self.unit == _SUB_BLOCK, _ISSUED, 1.0) * (2 if sizes.own_experts else 1)
        issuing = {name: parts * taken for name, taken in seconds.items()}
        return issuing | {"is_in_buckets": self.replicas.astype(float)}

    def _layers_of_units(self, sizes: Sizes, layers: int) -> tuple[float, ...]:
        """Return the layers of a unit by its kind."""
        filled = blocks_of_bucket(self.wires.base, sizes)
        return (*_UNITS, float(min(filled, layers)), float(layers))

    def _parts(self, degrees: Sequence[int]) -> dict[State, Array]:
        """Into how many slices states are cut."""
        np = numpy()
        return {
            state: np.where(cut, np.array(degrees, dtype=float), 1.0).prod(axis=1)
            for state, cut in self.cut.items()
        }

    def _bytes(self, parts: dict[State, Array]) -> Columns:
        """Return bytes per parameter that a rank has: `theta` and `omega` between steps, `grads`
        when backward is over (`reduced` of a stage that is over before the others), `unreduced`
        before the last micro-batch of what is reduced then, `whole` of a unit that is gathered,
        `opened` of a unit's gradients while they arrive, `flying` while they are reduced."""
        np, layout, near = numpy(), self.layout, self.near
        held, reduced = layout.parameters.itemsize, layout.reduced.itemsize
        state = optimizer_itemsize(self.wires.base.optimizer, layout)
        is_cut = parts[_GRADS] > 1
        return {
            "theta": np.where(self.materialized | ~near[_THETA], 0.0, held / parts[_THETA]),
            "omega": np.where(near[_OMEGA], state / parts[_OMEGA], 0.0),
            "grads": np.where(near[_GRADS], layout.gradients.itemsize / parts[_GRADS], 0.0),
            # where nothing cuts them what the update reduces first begins beside the backward pass
            "reduced": np.where(
                near[_GRADS],
                layout.gradients.itemsize
                / np.where(self.flat & ~is_cut & (self.overlaps > 0), parts[_OMEGA], parts[_GRADS]),
                0.0,
            ),
            "outputs": self.by_tensor * self.sums_copies * float(reduced) / parts[_GRADS],
            "is_cast": np.full(len(is_cut), float(layout.reduced is not layout.gradients)),
            "unreduced": np.where(is_cut & (self.fixed["is_late"] > 0), float(reduced), 0.0),
            "whole": np.where(self.brought, float(held), 0.0),
            "opened": np.where(is_cut, np.where(self.flat, float(reduced), float(held)), 0.0),
            # what flat units reduce beside the backward pass is there until the next one's is over;
            # where nothing cuts gradients they are summed where they are kept
            "flying": reduced
            * np.where(is_cut, ~self.flat | (self.overlaps > 0), self.flat * layout.keeps_both),
        }

    def _added(self, times: Array, tensors: Sequence[int]) -> Array:
        """Seconds of the sum of a unit's gradients and those of the micro-batches before, tensor by
        tensor: read twice and written. Of what is reduced after each there is none, but of flat
        units, which every micro-batch is added to."""
        np, held = numpy(), self.layout.parameters.itemsize
        sums = times * self._of_bytes(OperatorKind.POINTWISE, 3 * held * np.array(tensors)).sum()
        return np.where(self.by_tensor & ~(self.fixed["is_late"] > 0), 0.0, sums)

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

    def _copied(self, parts: dict[State, Array], state: int, held: int) -> Array:
        """Of a parameter: state that is updated on the device goes there and back. How long a host
        takes for an update nobody measures: that is endless."""
        np = numpy()
        near = self.near[_OMEGA]
        if near.all():
            return 0.0
        over_host = self.wires.there_and_back(Tier.HOST)
        over_file = self.wires.there_and_back(Tier.FILE) if self.on_file.any() else 0.0
        on_host = held / parts[_OMEGA] * over_host if self.wires.is_nominal else np.inf
        moved = np.where(self.back, state / parts[_OMEGA] * over_host, on_host)
        filed = state / parts[_OMEGA] * over_file
        return np.where(near, 0.0, moved + np.where(self.on_file, filed, 0.0))
