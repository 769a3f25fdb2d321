"""A row of the legality table: what a product must satisfy, why, and the nearest one that does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ptrain.errors import Fault
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Axis, Factor, Placement
from ptrain.spec.spec import Spec


class TupleRule(NamedTuple):
    """About one factor's tuple. `theorem` names the condition that a broken rule would break."""

    name: str
    theorem: str
    broken: Callable[[Placement, OptimizerSpec], bool]
    message: str
    nearest: Callable[[Placement], Placement]


class SpecRule(NamedTuple):
    """About a spec as a whole; `faults` yields what is wrong with it, remedy included."""

    name: str
    theorem: str
    faults: Callable[[Spec], Iterable[Fault]]


class AxisRules(NamedTuple):
    """What one room contributes to the table."""

    axes: tuple[Axis, ...]
    tuples: tuple[TupleRule, ...]
    specs: tuple[SpecRule, ...] = ()
    not_yet: tuple[SpecRule, ...] = ()

    def broken(self, placement: Placement, optimizer: OptimizerSpec) -> Iterator[TupleRule]:
        """The rules that this tuple breaks on these axes."""
        return (rule for rule in self.tuples if rule.broken(placement, optimizer))

    def nearest(self, placement: Placement, optimizer: OptimizerSpec) -> Placement:
        """Return the tuple after all broken rules' repairs: legal, and itself where it was
        legal."""
        for rule in self.tuples:
            if rule.broken(placement, optimizer):
                placement = rule.nearest(placement)
        return placement

    def factors(self, spec: Spec) -> Iterator[Factor]:
        """The factors of `spec` that these rules are about."""
        return (factor for factor in spec.factors if factor.axis in self.axes)

    def trivial_factors(self, spec: Spec) -> Iterator[Factor]:
        """Those of degree 1 that have a tuple."""
        return (factor for factor in spec.trivial_factors if factor.axis in self.axes)
