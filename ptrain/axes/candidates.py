"""What an axis offers to a search: which ranks it may take of a job, and what it may do with them.

A room answers for all of its axes at once; the search puts one choice of each room together and
knows none of them. A new axis brings a space of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ptrain.spec.axis import Axis, Factor
from ptrain.spec.batch import Batch
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """Factors of some axes, and what else a spec says then: `changes` are its fields."""

    factors: tuple[Factor, ...] = ()
    changes: tuple[tuple[str, Any], ...] = field(default=(), hash=False)

    def degree(self, axis: Axis) -> int:
        """Return the ranks along one axis, 1 without it."""
        return next((factor.degree for factor in self.factors if factor.axis is axis), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpace:
    """A room's part of a search: `sizes` yields how many of so many devices its axes may take
    together, `choices` what they may do with so many ranks of a job like the spec."""

    axes: tuple[Axis, ...]
    sizes: Callable[[Spec, int], Iterable[int]]
    choices: Callable[[Spec, int], Iterable[AxisChoice]]


_ORDER = {axis: place for place, axis in enumerate(Axis)}


def chosen(spec: Spec, choices: Iterable[AxisChoice], batch: Batch | None = None) -> Spec:
    """Return the spec with one choice of each room, outermost the axis that `Axis` has first, and
    with another batch."""
    factors: list[Factor] = []
    changes: dict[str, Any] = {"batch": batch or spec.batch}
    for choice in choices:
        factors += [factor for factor in choice.factors if factor.degree > 1]
        changes |= choice.changes
    factors.sort(key=lambda factor: _ORDER[factor.axis])
    return replace(spec, factors=tuple(factors), trivial_factors=(), **changes)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
