"""What an axis offers to a search: which ranks it may take of a job, and what it may do with them.

A room answers for all of its axes at once; the search puts one choice of each room together and
knows none of them. A new axis brings a space of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ptrain.spec.activations import Kept
from ptrain.spec.batch import Batch
from ptrain.spec.placement import DATA_AXES, Axis, Factor, Placement, Tier
from ptrain.spec.spec import Spec

# Tuples of some axes and fields of a spec with their values.
Way = tuple[tuple[Placement, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What of a candidate a spec writes, and so no room chooses: degrees and tuples by axis, values
    by the path of their field (`unit`, `sync.gradients`), and how blocks may keep activations."""

    degrees: tuple[tuple[Axis, int], ...] = ()
    tuples: tuple[tuple[Axis, Placement], ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    kept: tuple[Kept, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Return tuples and fields that are written, as a spec says them."""
        placed = (f"placement.{axis}={placement}" for axis, placement in self.tuples)
        return (*placed, *(f"{path}={_text(value)}" for path, value in self.values))

    def degree(self, axis: Axis) -> int | None:
        """Return the degree that is written."""
        return dict(self.degrees).get(axis)

    def value(self, path: str, offered: Any) -> Any:
        """Return a field's value: what is written of it, and what is offered of all else."""
        values: Mapping[str, Any] = dict(self.values)
        inner = {p.partition(".")[2]: v for p, v in values.items() if p.startswith(f"{path}.")}
        return values.get(path, replace(offered, **inner) if inner else offered)

    @property
    def away(self) -> Tier:
        """Return where what a search tries off the device is."""
        tier: Tier = self.value("offload.tier", Tier.HOST)
        return tier

    def says(self, path: str) -> bool:
        """Return whether a field, or something of it, is written."""
        return any(written.startswith(path) for written, _ in self.values)

    def sizes(self, axis: Axis, devices: int, offered: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks on an axis: what is written if it divides the devices, or `offered`."""
        if (degree := self.degree(axis)) is None:
            return tuple(offered)
        return (degree,) if devices % degree == 0 else ()

    def held(
        self, axes: tuple[Axis, ...], ways: Iterable[Way], also: Iterable[str] = ()
    ) -> tuple[Way, ...]:
        """Return the ways on these axes that say what is written, or, where none of them does, all
        with it in the place of what they say. `also` are fields that no way says."""
        ways = tuple(ways)
        more = tuple((path, value) for path, value in self.values if path in also)
        held = tuple(self._held(axes, way) for way in ways)
        agreeing = tuple(way for way, other in zip(ways, held, strict=True) if way == other)
        return tuple(
            (placements, (*changes, *more))
            for placements, changes in dict.fromkeys(agreeing or held)
        )

    def _held(self, axes: tuple[Axis, ...], way: Way) -> Way:
        tuples, (placements, changes) = dict(self.tuples), way
        return (
            tuple(tuples.get(axis, p) for axis, p in zip(axes, placements, strict=True)),
            tuple((name, self.value(name, offered)) for name, offered in changes),
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


NOTHING = Written()


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """Factors of some axes, and what else a spec says then: `changes` are its fields. `follows`:
    the factors place Theta, Omega and G as the innermost data axis does, whatever its degree."""

    factors: tuple[Factor, ...] = ()
    changes: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    follows: bool = False

    def degree(self, axis: Axis) -> int:
        """Return the ranks along one axis, 1 without it."""
        return next((factor.degree for factor in self.factors if factor.axis is axis), 1)

    @property
    def shared(self) -> int:
        """Return over how many ranks more the states of a data axis go."""
        return prod(factor.degree for factor in self.factors) if self.follows else 1

    def following(self, states: Placement) -> Iterator[Factor]:
        """Yield its factors, where it `follows` with these states."""
        for factor in self.factors:
            own = replace(states, activations=factor.placement.activations)
            yield factor._replace(placement=own) if self.follows else factor


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpace:
    """A room's part of a search: `sizes` yields how many of so many devices its axes may take
    together, `choices` what they may do with so many ranks of a job like the spec, but for what is
    written. `tuples` are those that it tries by itself on each of its axes."""

    axes: tuple[Axis, ...]
    sizes: Callable[[Spec, int, Written], Iterable[int]]
    choices: Callable[[Spec, int, Written], Iterable[AxisChoice]]
    tuples: Mapping[Axis, tuple[Placement, ...]]


def of_one_axis(
    axis: Axis,
    sizes: Callable[[Spec, int, Written], Iterable[int]],
    ways: Callable[[Spec, int], Iterable[Way]],
    tuples: tuple[Placement, ...],
    *,
    follows: bool = False,
) -> AxisSpace:
    """Return the part of a room with one axis: `ways` yields what so many ranks may do. It
    `follows` the data axes unless its tuple is written."""

    def choices(spec: Spec, ranks: int, written: Written) -> Iterator[AxisChoice]:
        if ranks == 1:
            yield AxisChoice()
            return
        is_led = follows and axis not in dict(written.tuples)
        for (placement,), changes in written.held((axis,), ways(spec, ranks)):
            factor = Factor(axis=axis, degree=ranks, placement=placement)
            yield AxisChoice(factors=(factor,), changes=changes, follows=is_led)

    return AxisSpace(axes=(axis,), sizes=sizes, choices=choices, tuples={axis: tuples})


_ORDER = {axis: place for place, axis in enumerate(Axis)}


def chosen(spec: Spec, choices: Iterable[AxisChoice], batch: Batch | None = None) -> Spec:
    """Return the spec with one choice of each room, outermost the axis that `Axis` has first, and
    with another batch."""
    factors: list[Factor] = []
    changes: dict[str, Any] = {"batch": batch or spec.batch}
    choices = tuple(choices)
    states = _states(choices) if any(choice.follows for choice in choices) else None
    for choice in choices:
        own = choice.factors if states is None else choice.following(states)
        factors += [factor for factor in own if factor.degree > 1]
        changes |= choice.changes
    factors.sort(key=lambda factor: _ORDER[factor.axis])
    return spec.but(factors=tuple(factors), trivial_factors=(), **changes)


def _states(choices: Iterable[AxisChoice]) -> Placement | None:
    """The placement on the innermost data axis, of whatever degree."""
    data = [f for choice in choices for f in choice.factors if f.axis in DATA_AXES]
    return max(data, key=lambda factor: _ORDER[factor.axis]).placement if data else None


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
