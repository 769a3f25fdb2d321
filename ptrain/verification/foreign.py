"""A spec's prediction against a model that somebody else wrapped.

Compared is what such an object has in common with a program: resident bytes of parameters,
optimizer state and gradients, and every collective on more than a scalar. Left out are
activations, transient buffers and peaks, which hang on code around the model, a module's
buffers, and scalars, of which each framework has its own (norms, losses, flags). A wrapper that
does something else than its configuration says (replicas where shards were asked for, one unit
where blocks were meant) fails checks that name state and axis. A cause is named where the same spec
with another value of `reshard` predicts what was measured to the byte, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from ptrain.algebra.legality import check
from ptrain.costs import PLACED, Estimate, Phase, State, Traffic
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.meters.measure import Measurement
from ptrain.report.record import Check, compare, verdict
from ptrain.spec.axis import Axis
from ptrain.spec.dials import Reshard
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of

_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
_SCALARS = 64  # bytes a call
Axes = tuple[str, ...]
_AFTER_FORWARD: Mapping[bool | Reshard, str] = {
    Reshard.NON_ROOT: "the root stays gathered from forward to backward, as fully_shard has it "
    "without reshard_after_forward",
    False: "units stay gathered from forward to backward",
    True: "units, the root too, are given back after forward",
}


def compare_foreign(
    spec: Spec, measurement: Measurement, facts: ModelFacts | None = None
) -> tuple[Check, ...]:
    """Return the checks of this rank; the `why` of one that fails says the cause, if it is known.
    `facts` are the model's where the spec does not build it."""
    spec = replace(spec, device=measurement.device)  # whose kernels computed
    facts = facts or facts_of(spec)
    degrees = {factor.axis: factor.degree for factor in spec.factors if factor.degree > 1}
    names = {ranks: axes for axes, ranks in ranks_over_axes(degrees, measurement.rank).items()}
    renamed = {axes: names.get(ranks, axes) for axes, ranks in measurement.ranks_by_axes.items()}
    measured = _in_common(_renamed(measurement.estimate(), renamed))
    checks = compare(_in_common(derive(spec, facts).exact), measured)
    if verdict(checks) == "holds":
        return checks
    why = next(_causes(spec, facts, measured), "")
    return tuple(check if check.holds else replace(check, why=why) for check in checks)


def _causes(spec: Spec, facts: ModelFacts, measured: Estimate) -> Iterator[str]:
    """What the wrapper does with gathered units after forward, if that explains every figure."""
    for value, cause in _AFTER_FORWARD.items():
        other = replace(spec, sync=replace(spec.sync, reshard_after_forward=value))
        if other == spec or check(other):
            continue
        predicted = _in_common(derive(other, facts).exact)
        if verdict(compare(predicted, measured)) == "holds":
            written = f"reshard: {str(value).lower()}"
            yield f"{cause}; write {written}, which predicts every figure"


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


def _renamed(estimate: Estimate, names: Mapping[Axes, Axes]) -> Estimate:
    return replace(
        estimate,
        traffic=tuple(
            replace(row, key=replace(row.key, axes=names.get(row.key.axes, row.key.axes)))
            for row in estimate.traffic
        ),
    )


def _in_common(estimate: Estimate) -> Estimate:
    return replace(
        estimate,
        memory=tuple(row for row in estimate.memory if row.state in _STATES),
        peak=(),
        traffic=tuple(row for row in estimate.traffic if _is_in_common(row)),
    )


def _is_in_common(row: Traffic) -> bool:
    return (
        row.key.phase is not Phase.SETUP
        and row.key.state in PLACED
        and row.payload_bytes > _SCALARS * row.calls
    )
