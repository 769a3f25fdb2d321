"""Rows of the legality table: a condition on a product, its reason, and the nearest legal
product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ptrain.errors import Fault
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Axis, Factor, Placement
from ptrain.spec.spec import Spec


class TupleRule(NamedTuple):
    """A rule about one factor's tuple. `theorem` names the condition that an illegal tuple
    violates."""

    name: str
    theorem: str
    is_broken: Callable[[Placement, OptimizerSpec], bool]
    message: str
    repair: Callable[[Placement], Placement]


class SpecRule(NamedTuple):
    """A rule about a full spec; `faults` yields its violations with remedies."""

    name: str
    theorem: str
    faults: Callable[[Spec], Iterable[Fault]]


class AxisRules(NamedTuple):
    """The rules that one axis package contributes to the legality table."""

    axes: tuple[Axis, ...]
    tuples: tuple[TupleRule, ...]
    specs: tuple[SpecRule, ...] = ()
    unsupported: tuple[SpecRule, ...] = ()

    def broken_rules(self, placement: Placement, optimizer: OptimizerSpec) -> Iterator[TupleRule]:
        """Return the rules that this tuple breaks on these axes."""
        return (rule for rule in self.tuples if rule.is_broken(placement, optimizer))

    def nearest_legal(self, placement: Placement, optimizer: OptimizerSpec) -> Placement:
        """Return the tuple after the repairs of all broken rules; a legal tuple is returned
        unchanged."""
        for rule in self.tuples:
            if rule.is_broken(placement, optimizer):
                placement = rule.repair(placement)
        return placement

    def factors(self, spec: Spec) -> Iterator[Factor]:
        """Return the factors of `spec` on the axes of these rules."""
        return (factor for factor in spec.factors if factor.axis in self.axes)

    def trivial_factors(self, spec: Spec) -> Iterator[Factor]:
        """Return the factors of degree 1 on the axes of these rules that have a tuple."""
        return (factor for factor in spec.trivial_factors if factor.axis in self.axes)
