"""What the expert axis offers to a search: degrees that divide a layer's experts, where these have
a capacity or a bound of the routing is stated. Without both a router decides how much a rank gets,
and whether it fits nobody claims: a degree that is written is tried all the same.

Theta, Omega and G of all but the experts are placed over ep as over the innermost data axis, so
that both are one group; of the experts there is one tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

from ptrain.axes.candidates import AxisChoice, AxisSpace, Written, divisors
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis, Factor, Placement, R
from ptrain.spec.routing import Bound
from ptrain.spec.spec import Spec

_COPIES = Placement(parameters=R, optimizer=R, gradients=R)


def _sizes(spec: Spec, devices: int, written: Written) -> Iterable[int]:
    shape = spec.model
    has_places = isinstance(shape, ModelShape) and shape.capacity_factor is not None
    is_known = has_places or isinstance(spec.routing, Bound)
    experts = shape.experts if isinstance(shape, ModelShape) and is_known else None
    return written.sizes(Axis.EP, devices, divisors(gcd(experts or 1, devices)))


def _choices(spec: Spec, ranks: int, written: Written) -> Iterator[AxisChoice]:
    if ranks == 1:
        yield AxisChoice()
        return
    is_written = Axis.EP in dict(written.tuples)
    for (placement,), changes in written.held((Axis.EP,), (((_COPIES,), ()),)):
        factor = Factor(axis=Axis.EP, degree=ranks, placement=placement)
        yield AxisChoice(factors=(factor,), changes=changes, follows=not is_written)


SPACE = AxisSpace(axes=(Axis.EP,), sizes=_sizes, choices=_choices, tuples={Axis.EP: (_COPIES,)})
