"""What a model that somebody else wrapped has in common with a program of a spec.

Resident bytes of parameters, optimizer state and gradients, and every collective on more than a
scalar. Left out are activations, transient buffers and peaks, which hang on code around the model,
a module's buffers, and scalars, of which each framework has its own (norms, losses, flags).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from ptrain.costs import PLACED, Estimate, Phase, State, Traffic
from ptrain.meters.measure import Measurement
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec

_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
_SCALARS = 64  # bytes a call
Axes = tuple[str, ...]


def ranks_over_axes(degrees: Mapping[Axis, int], rank: int) -> dict[Axes, tuple[int, ...]]:
    """Return for every choice of axes the ranks that differ from `rank` on these alone
    (row-major)."""
    strides: dict[Axis, int] = {}
    stride = 1
    for axis in reversed(tuple(degrees)):
        strides[axis], stride = stride, stride * degrees[axis]
    ranks_by_axes: dict[Axes, tuple[int, ...]] = {}
    for count in range(1, len(degrees) + 1):
        for chosen in combinations(degrees, count):
            ranks = [rank]
            for axis in chosen:
                place = rank // strides[axis] % degrees[axis]
                ranks = [
                    start + (index - place) * strides[axis]
                    for start in ranks
                    for index in range(degrees[axis])
                ]
            ranks_by_axes[tuple(map(str, chosen))] = tuple(sorted(ranks))
    return ranks_by_axes


def with_axes_of(estimate: Estimate, spec: Spec, measurement: Measurement) -> Estimate:
    """Return what was measured, with the spec's axes for names of groups that have their ranks."""
    degrees = {factor.axis: factor.degree for factor in spec.factors if factor.degree > 1}
    names = {ranks: axes for axes, ranks in ranks_over_axes(degrees, measurement.rank).items()}
    renamed = {axes: names.get(ranks, axes) for axes, ranks in measurement.ranks_by_axes.items()}
    return _renamed(estimate, renamed)


def _renamed(estimate: Estimate, names: Mapping[Axes, Axes]) -> Estimate:
    return replace(
        estimate,
        traffic=tuple(
            replace(row, key=replace(row.key, axes=names.get(row.key.axes, row.key.axes)))
            for row in estimate.traffic
        ),
    )


def in_common(estimate: Estimate) -> Estimate:
    """Return the figures that a model that somebody else wrapped has in common with a program."""
    return replace(
        estimate,
        memory=tuple(row for row in estimate.memory if row.state in _STATES),
        peak=(),
        operations=(),
        traffic=tuple(row for row in estimate.traffic if _is_in_common(row)),
        accounts=(),
        account_of=(),
        undefined={kind: why for kind, why in estimate.undefined.items() if kind == "traffic"},
    )


def _is_in_common(row: Traffic) -> bool:
    return (
        row.key.phase is not Phase.SETUP
        and row.key.state in PLACED
        and row.payload_bytes > _SCALARS * row.calls
    )
