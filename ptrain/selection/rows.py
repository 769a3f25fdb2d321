"""The choices of the data axes as arrays: coefficients of bytes and seconds, by which a search
scores them for one rank's part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ptrain.axes.candidates import AxisChoice
from ptrain.cost import State
from ptrain.optimizers.update import optimizer_itemsize
from ptrain.selection.arrays import Array, Columns, numpy
from ptrain.selection.moves import inside
from ptrain.selection.profile import Sizes
from ptrain.selection.unit_ways import DataWay, SharedUnits
from ptrain.spec.dials import UnitSize
from ptrain.spec.placement import Tier

_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
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


class Ways:
    """Choices over the same axes that are legal beside the same other choices, as arrays; `units`:
    those that are unlike in what they do with a unit."""

    def __init__(self, shared: SharedUnits, ways: Sequence[DataWay]) -> None:
        np, wires = numpy(), shared.wires
        self.wires, self.ways = wires, ways
        self.units, self._like = shared.of(ways)
        self._of_units: dict[frozenset[UnitSize | None], Array] = {}
        self.layout = wires.base.precision.effective
        self.materialized, self.brought, self.flat, self.by_tensor = (
            of.take(self._like)
            for of in (
                self.units.materialized,
                self.units.brought,
                self.units.flat,
                self.units.by_tensor,
            )
        )
        self.sums_copies = np.array([not all(way.cut[_GRADS]) for way in ways], dtype=bool)
        self.near = {
            state: np.array([way.near[state] for way in ways], dtype=bool)
            for state in (_THETA, _OMEGA, _GRADS)
        }
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
        return replace(way, factors=tuple(f._replace(degree=d) for f, d in factors))

    def of_units(self, units: frozenset[UnitSize | None]) -> Array:
        """Return which of them move one of these units."""
        if units not in self._of_units:
            said = {id(way.said_unit): way.said_unit in units for way in self.ways}
            fine = [said[id(way.said_unit)] for way in self.ways]
            self._of_units[units] = numpy().array(fine, dtype=bool)
        return self._of_units[units].copy()

    def row_shards(self, degrees: Sequence[int]) -> Array:
        """Return over how many ranks parameters are cut by rows; 1 where not tensor by tensor."""
        return self.units.row_shards(degrees).take(self._like)

    def columns(self, degrees: Sequence[int], sizes: Sizes, within: int, layers: int) -> Columns:
        """Return the coefficients, of a rank that has about so many layers: bytes (`_bytes`) of so
        many units and parameters, seconds of its units (`UnitWays.columns`), whose gathers go on
        beside the update of those behind it (`spread_beside`), and of a parameter that is `copied`
        between tiers then. Gradients are added to those before, which flat units do with the first,
        too (`adds_first`); of what is reduced after every micro-batch nothing is added, but of flat
        units, which all of them are added to.
        """
        np, layout = numpy(), self.layout
        held = layout.parameters.itemsize
        parts = self._parts(degrees)
        fewer = self._parts(inside(degrees, sizes.shared_by))
        times = {state: part / fewer[state] for state, part in parts.items()}
        state = optimizer_itemsize(self.wires.base.optimizer, layout)
        seconds = self.units.columns(degrees, sizes, within, layers)
        columns = {name: of.take(self._like) for name, of in seconds.items()}
        adds_none = self.by_tensor & ~(self.fixed["is_late"] > 0)
        for name in ("add", "add_end"):
            columns[name] = np.where(adds_none, 0.0, columns[name])
        return {
            **self.fixed,
            **columns,
            "overlaps": self.overlaps,
            "adds_first": self.flat.astype(float),
            **(memory := self._bytes(parts)),
            "lives_of_experts": memory["theta"] * times[_THETA] + memory["omega"] * times[_OMEGA],
            "grads_of_experts": memory["grads"] * times[_GRADS],
            "spread_beside": self.gathers_beside,
            "copied": self._copied(parts, state, held) + np.zeros(len(self.flat)),
        }

    def _parts(self, degrees: Sequence[int]) -> dict[State, Array]:
        """Into how many slices states are cut."""
        return {state: of.take(self._like) for state, of in self.units.parts(degrees).items()}

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
