"""Which ranks have and do the same: those at the same place along the cutting axes, and where sizes
depend on where tokens go, of these those that send and get the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ptrain.by_rank import of_own
from ptrain.cost import Estimate
from ptrain.derivation import tensor
from ptrain.derivation.machine import slowest
from ptrain.facts.model import ModelFacts, RowsTimeline
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, positions
from ptrain.steps.experts import ByLayer, token_places
from ptrain.steps.step import Plan
from ptrain.timeline import Timeline


@dataclass(frozen=True, eq=False, repr=False, slots=True, kw_only=True)
class RanksPart:
    """What ranks at these `places` have of a model, as facts; the first of them stands at `index`
    along the cutting axes. `loads` are the rows that they send and get, None where these are even.
    """

    facts: ModelFacts
    index: int
    places: tuple[int, ...]
    loads: ByLayer | None = None


class RanksParts(NamedTuple):
    """The parts, with the `axes` along which places are counted."""

    axes: tuple[Axis, ...]
    parts: Sequence[RanksPart]


def parts_of_ranks(spec: Spec, plan: Plan, facts: ModelFacts) -> RanksParts:
    """Return what the ranks have of a model without stages."""
    parts = [
        RanksPart(facts=part, index=indices[0], places=indices)
        for part, indices in tensor.parts(spec, plan, facts)
    ]
    if plan.loads is None:
        return RanksParts(axes=plan.cutting_axes, parts=parts)
    axes = tuple(factor.axis for factor in spec.factors)
    return RanksParts(axes=axes, parts=[*_by_loads(spec, plan, facts, parts)])


def joined(spec: Spec, ranks: RanksParts, parts: Sequence[Estimate]) -> Estimate:
    """Return the estimates of the model's parts as one: each rank has memory and peak of its own
    part, and traffic has a row for each account where they differ."""
    first, *others = parts
    if not others:
        return first
    number_of = {place: n for n, part in enumerate(ranks.parts) for place in part.places}
    estimate_of = {place: parts[number] for place, number in number_of.items()}
    index_of = positions(spec, ranks.axes)
    column_of = [number_of[index] for index in index_of]
    return replace(
        first,
        step=slowest(estimate.step for estimate in parts),
        memory=of_own([estimate.memory for estimate in parts], column_of),
        peak=of_own([estimate.peak for estimate in parts], column_of),
        accounts=tuple(estimate_of[index].traffic for index in sorted(estimate_of)),
        account_of=index_of,
        traffic=tuple(
            dict.fromkeys(
                row
                for key in dict.fromkeys(row.key for estimate in parts for row in estimate.traffic)
                for index in sorted(estimate_of)
                for row in estimate_of[index].traffic
                if row.key == key
            )
        ),
    )


def _by_loads(
    spec: Spec, plan: Plan, facts: ModelFacts, parts: Sequence[RanksPart]
) -> Iterator[RanksPart]:
    """Yield the parts of ranks that send and get the same; a place is a rank."""
    loads = plan.loads
    assert loads is not None, "they are uneven"
    part_of = {index: part for part in parts for index in part.places}
    like: dict[tuple[int, int], list[int]] = {}
    loads_by_place = {place: loads.of(place) for place in token_places(spec)}
    for rank, index in enumerate(positions(spec, plan.cutting_axes)):
        own = loads_by_place[token_places(spec)[rank]]
        like.setdefault((part_of[index].index, id(own)), []).append(rank)
    for (index, _), ranks in like.items():
        own = loads_by_place[token_places(spec)[ranks[0]]]
        part = part_of[index].facts
        formula = facts.part_rows[index] if facts.part_rows else None
        yield RanksPart(
            facts=_with_rows(part, formula, own), index=index, places=tuple(ranks), loads=own
        )


def _with_rows(part: ModelFacts, formula: RowsTimeline | None, loads: ByLayer) -> ModelFacts:
    """Return the part with a timeline for every micro-batch; with none where there is no
    formula."""
    if formula is None:
        return replace(part, timeline=None)
    timelines: dict[tuple[int, ...], Timeline] = {}
    micro_batches = []
    for rows in zip(*loads.values(), strict=True):
        received = tuple(of_layer.received for of_layer in rows)
        if received not in timelines:
            timelines[received] = formula.at(received)
        micro_batches.append(timelines[received])
    return replace(part, timeline=micro_batches[-1], micro_batches=tuple(micro_batches))
