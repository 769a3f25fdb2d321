"""What each rank of a pipeline holds: stages are unequal, and so are micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.by_rank import unranked
from ptrain.costs import Estimate, State, lower_bytes
from ptrain.plan.composition import ranks_text
from ptrain.report.table import largest, least, on_tiers, render, span
from ptrain.spec.layout import positions
from ptrain.spec.spec import Spec
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
    most = largest(exact.memory)
    kept = [
        (state, tier, label)
        for state in State
        for tier, label in on_tiers(state)
        if most.get((state, tier))
    ]

    def rows() -> Iterator[tuple[str, ...]]:
        for place, own in enumerate(map(set, ranks)):
            memory, stages = [*unranked(exact.memory, own)], step.stages_of(place)
            here, lowers = largest(memory), least(memory)
            peaks = [*unranked(exact.peak, own)]
            yield (
                str(place),
                ranks_text(ranks[place]),
                " ".join(map(str, stages)),
                str(sum(len(step.layers[stage]) for stage in stages)),
                *(
                    span(lowers.get((state, tier)), here.get((state, tier)))
                    for state, tier, _ in kept
                ),
                span(
                    max(map(lower_bytes, peaks), default=None),
                    max((row.device_bytes for row in peaks), default=None),
                ),
            )

    labels = (label for _, _, label in kept)
    columns = (str(step.axis), "ranks", "stages", "layers", *labels, "peak")
    return render(columns, rows(), left=(0, 1, 2))
