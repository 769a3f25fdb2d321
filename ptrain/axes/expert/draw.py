"""The expert axis as text: the experts of each rank, the dispatched rows, and the axes over which
gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ptrain.spec.routing import Histogram
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.experts import ExpertParallel, Loads, num_choices, token_places
from ptrain.steps.step import Plan
from ptrain.units import format_bytes, with_noun

_FEW_RANKS = 8


def step_text(step: ExpertParallel) -> str:
    """Return a plan's line about the step."""
    layers = with_noun(len(step.modules), "layer")
    slices = f", of a slice of the tokens on each of {step.folded[0]}" if step.folded else ""
    meanwhile = ", while shared experts compute," if step.overlaps else ""
    return (
        f"distribute the experts of {layers} over {_axes_text(step)}: each rank holds full experts "
        f"with their Θ, Ω and G; tokens are dispatched to them{meanwhile} and combined{slices}"
    )


def _axes_text(step: ExpertParallel) -> str:
    return " × ".join(step.axes)


def expert_lines(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield the experts of each rank of the axis, the dispatched rows, and the axes that sum
    gradients.

    Yield nothing if experts are not sharded.
    """
    if (step := plan.experts) is None:
        return
    ranks = ranks_over(spec, step.axes)
    own = step.number // ranks
    for rank in islice(range(ranks), _FEW_RANKS):
        yield f"experts  {_axes_text(step)} {rank}: {_span_text(rank * own, own)} of {step.number}"
    if ranks > _FEW_RANKS:
        yield f"experts  … {ranks} ranks of {_axes_text(step)}"
    yield f"dispatch {_dispatch_text(spec, step, ranks)}"
    if plan.loads is not None:
        yield f"routing  {_routing_text(spec, plan.loads)}"
    yield f"reduced  {_reduction_text(plan, step)}"


def _span_text(first: int, number: int) -> str:
    return f"{first}-{first + number - 1}" if number > 1 else str(first)


def _dispatch_text(spec: Spec, step: ExpertParallel, ranks: int) -> str:
    """Return the size of an all-to-all. Each layer and micro-batch has two in forward and two in
    backward."""
    micro, size = (
        spec.batch.micro,
        step.features * spec.precision.effective_layout.parameters.itemsize,
    )
    away = f"{ranks - 1}/{ranks} of it to other ranks"
    often = "to their experts and back, per layer and micro-batch, in forward and in backward"
    if step.places is not None:
        places = step.number * micro * step.places
        return (
            f"{with_noun(places, 'place')} of {step.features} features {often}: "
            f"{format_bytes(places * size)}, {away}, independent of the routing"
        )
    rows = num_choices(spec, step)
    return (
        f"{with_noun(rows, 'row')} of {step.features} features {often}: "
        f"{format_bytes(rows * size)}, {away} if experts are chosen equally often; "
        "row counts are exchanged first"
    )


def _routing_text(spec: Spec, loads: Loads) -> str:
    """Return the range of rows that ranks receive under the spec's routing."""
    received = {
        rows.num_received
        for place in {*token_places(spec)}
        for of_layer in loads.rows_by_layer(place).values()
        for rows in of_layer
    }
    stated = "as counted" if isinstance(spec.routing, Histogram) else f"{spec.routing}"
    least, most = min(received), max(received)
    return f"{stated}: the experts of a rank get {least} to {with_noun(most, 'row')} per layer"


def _reduction_text(plan: Plan, step: ExpertParallel) -> str:
    over = " × ".join(axis for axis in plan.summed_axes if axis is not step.axis)
    experts = f"over {over}" if over else "not reduced, because one rank has all their tokens"
    return (
        f"gradients of experts {experts}; all other gradients over {' × '.join(plan.summed_axes)}"
    )
