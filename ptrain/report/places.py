"""What each rank of a pipeline holds: stages are unequal, and so are micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.by_rank import unranked
from ptrain.cost import Estimate, Peak, State, lower_bytes
from ptrain.plan.composition import ranks_text
from ptrain.report.table import (
    Importance,
    TableColumn,
    largest,
    least,
    name_column,
    on_tiers,
    render,
    span,
)
from ptrain.spec.spec import Spec, positions
from ptrain.steps.step import Plan


def by_place(spec: Spec, plan: Plan, exact: Estimate) -> str:
    """Return a table with a row per place along pp: its ranks, stages, number of layers, bytes of
    each state and the peak, of that one of its ranks which has most; it is empty without pp."""
    step = plan.pipeline
    if step is None:
        return ""
    places = positions(spec, (step.axis,))
    ranks: list[list[int]] = [[] for _ in range(max(places) + 1)]
    for rank, place in enumerate(places):
        ranks[place].append(rank)
    holders = [set(own) for own in ranks]
    memory = [[*unranked(exact.memory, own)] for own in holders]
    peaks = [[*unranked(exact.peak, own)] for own in holders]
    most, fewest = [*map(largest, memory)], [*map(least, memory)]
    stages = [step.stages_of(place) for place in range(len(ranks))]
    pairs = [*zip(fewest, most, strict=True)]
    columns = [
        name_column(str(step.axis), [str(place) for place in range(len(ranks))]),
        TableColumn("ranks", Importance.DETAIL, [*map(ranks_text, ranks)], left=True),
        TableColumn("stages", cells=[" ".join(map(str, own)) for own in stages], left=True),
        TableColumn(
            "layers",
            Importance.DETAIL,
            [str(sum(len(step.layers[stage]) for stage in own)) for own in stages],
        ),
        *(
            TableColumn(
                label,
                cells=[
                    span(low.get((state, tier)), high.get((state, tier))) for low, high in pairs
                ],
            )
            for state in State
            for tier, label in on_tiers(state)
            if any(high.get((state, tier)) for high in most)
        ),
        TableColumn("peak", Importance.RESULT, [_peak(own) for own in peaks]),
    ]
    return render(columns)


def _peak(rows: Sequence[Peak]) -> str:
    bounds = max(map(lower_bytes, rows), default=None)
    return span(bounds, max((row.device_bytes for row in rows), default=None))
