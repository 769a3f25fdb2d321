"""The pipeline axis in the exact column: each stage's part of the model, what every rank holds of
its stages, and what it sends over their boundaries.

A stage is a model like any other, with fewer layers: the data axes and the operators of tp derive
its costs as they do a whole model's. A rank adds up its stages, each wrapped by itself and with
buffers of its own; the step's tokens and targets and the loss are there once, on every rank.

What a step of pp leaves in flight is `in_flight`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ptrain.algebra.layout import positions
from ptrain.axes.pipeline.gathers import stage_gathers
from ptrain.axes.pipeline.holdings import Transfer, transfers
from ptrain.axes.pipeline.known import schedule_of
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.axes.pipeline.stage_facts import chain_of, stage_facts, stage_roles, stages_of
from ptrain.axes.ring import Calls
from ptrain.axes.tensor.costs import Cut
from ptrain.costs import Footprint, State, Traffic, add_traffic
from ptrain.derivation import blocks, tensor
from ptrain.derivation.calls import group_over
from ptrain.derivation.differing import differing_axes
from ptrain.derivation.ghosts.clipping import norm
from ptrain.derivation.ghosts.table import wrapping
from ptrain.derivation.kept import kept_traffic
from ptrain.derivation.memory import by_shard, other_bytes
from ptrain.derivation.stage_timeline import Pairs, moved_and_repeated
from ptrain.derivation.tied import Rows, tied_sums
from ptrain.facts.model import ModelFacts
from ptrain.facts.passes import Passes
from ptrain.facts.stages import ENDS, Ends, Stage
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

_PLACED = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


def parts(spec: Spec, plan: Plan, part: ModelFacts) -> dict[ModelFacts, tuple[int, ...]]:
    """What the ranks of tp have of one stage's part, and which of them have it; `plan` is the
    stage's."""
    step = plan.tensor
    if step is None:
        return {part: (0,)}
    alike = tensor.local_units(part, step, spec.degree(step.axis))
    return {replace(part, units=units): indices for units, indices in alike}


def stage_plan(plan: Plan, stage: Stage, ends: Ends = ENDS) -> Plan:
    """The plan as one stage sees it: of tp the roles of its own modules."""
    assert plan.pipeline is not None
    if plan.tensor is None:
        return plan
    roles = stage_roles(plan.tensor.roles, stage, plan.pipeline.stages, ends)
    return plan.having(replace(plan.tensor, roles=roles))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """One stage: the plan as it sees it, its facts, and what the ranks of tp have of it, each part
    with their places; where these were traced, the passes of each place."""

    stage: Stage
    plan: Plan
    facts: ModelFacts
    parts: Mapping[ModelFacts, tuple[int, ...]]
    passes: tuple[Passes, ...] = ()

    def cut(self, spec: Spec, index: int) -> Cut | None:
        """How the operators of the rank at this place along tp are cut."""
        step = self.plan.tensor
        return Cut(step=step, degree=spec.degree(step.axis), index=index) if step else None

    def of(self, index: int) -> ModelFacts:
        """What the rank at this place along tp has."""
        return next(part for part, indices in self.parts.items() if index in indices)


def staged(spec: Spec, plan: Plan, facts: ModelFacts) -> tuple[StageParts, ...]:
    """The stages, first to last."""
    ends = chain_of(spec, facts).ends
    found = []
    for stage in stages_of(spec, facts):
        own, part = stage_plan(plan, stage, ends), stage_facts(facts, stage)
        traced = facts.stage_passes[stage.index] if facts.stage_passes else ()
        found.append(
            StageParts(
                stage=stage, plan=own, facts=part, parts=parts(spec, own, part), passes=traced
            )
        )
    return tuple(found)


def resident(spec: Spec, plan: Plan, stages: Sequence[StageParts]) -> tuple[Footprint, ...]:
    """Rows of parameters, optimizer state, gradients and the rest, rank by rank."""
    step = plan.pipeline
    assert step is not None
    cut = (plan.tensor.axis,) if plan.tensor else ()
    places = zip(
        *(positions(spec, axes) for axes in ((step.axis,), cut, differing_axes(plan))),
        strict=True,
    )
    of_part = {
        (each.stage.index, index): rows
        for each in stages
        for local, indices in each.parts.items()
        for rows in [by_shard(spec, each.plan, local)]
        for index in indices
    }
    own = [step.stages_of(rank_of_pp) for rank_of_pp in range(spec.degree(step.axis))]
    known: dict[tuple[int, tuple[tuple[Footprint, ...], ...]], tuple[Footprint, ...]] = {}
    of_place: dict[tuple[int, ...], tuple[Footprint, ...]] = {}
    found: list[Footprint] = []
    for rank, place in enumerate(places):
        if place not in of_place:
            rank_of_pp, index, shard = place
            held = tuple(of_part[stage, index][shard] for stage in own[rank_of_pp])
            if (rank_of_pp, held) not in known:
                known[rank_of_pp, held] = _rows(spec, stages, own[rank_of_pp], held)
            of_place[place] = known[rank_of_pp, held]
        found += [row.of_rank(rank) for row in of_place[place]]
    return tuple(found)


def _rows(
    spec: Spec,
    stages: Sequence[StageParts],
    own: Sequence[int],
    held: Sequence[tuple[Footprint, ...]],
) -> tuple[Footprint, ...]:
    """The rows of a rank that has these stages, of each of which it holds so much."""
    buffers = tuple(row for stage in own for row in stages[stage].facts.buffers)
    size = other_bytes(spec, replace(stages[0].facts, buffers=buffers))
    other = Footprint(state=State.OTHER, rank=0, device_bytes=size)
    rows = list(chain.from_iterable(held))
    return (*(_sum(state, rows) for state in _PLACED), other)


def _sum(state: State, rows: Iterable[Footprint]) -> Footprint:
    held = [row for row in rows if row.state is state]
    return Footprint(
        state=state,
        rank=0,
        device_bytes=sum(row.device_bytes for row in held),
        host_bytes=sum(row.host_bytes for row in held),
        file_bytes=sum(row.file_bytes for row in held),
    )


def accounts(
    spec: Spec, plan: Plan, facts: ModelFacts, stages: Sequence[StageParts]
) -> tuple[tuple[Rows, ...], tuple[int, ...]]:
    """What the ranks send in a step: over the boundaries, and of each stage what the data axes, the
    operators of tp and the sums of its shared tensors send. An account for each place along pp,
    and there along tp and for each shard where these differ; and by rank which is its own."""
    step, made = plan.pipeline, schedule_of(spec)
    assert step is not None
    crossing = transfers(made)
    hidden = chain_of(spec, facts).hidden
    of_stage = [_of_stage(spec, made, stage) for stage in stages]
    place_of = _places(spec, plan, stages, of_stage)
    ghost = wrapping(spec, plan, facts)
    places = sorted(set(place_of))
    found = tuple(
        add_traffic(
            (
                *over_boundaries(spec, plan, (t for t in crossing if t.rank == rank), hidden),
                *norm(ghost),
                *(row for s in step.stages_of(rank) for row in _at(of_stage[s][index], shard)),
            )
        )
        for rank, index, shard in places
    )
    account_of = {place: number for number, place in enumerate(places)}
    return found, tuple(account_of[place] for place in place_of)


def _places(
    spec: Spec, plan: Plan, stages: Sequence[StageParts], of_stage: Sequence[list[list[Rows]]]
) -> list[tuple[int, int, int]]:
    """By rank its place along pp, along tp and among the shards; 0 where all send the same."""
    step = plan.pipeline
    assert step is not None
    cut = (plan.tensor.axis,) if plan.tensor and any(len(each.parts) > 1 for each in stages) else ()
    is_uneven = any(len(shards) > 1 for of_index in of_stage for shards in of_index)
    shards = differing_axes(plan) if is_uneven else ()
    return list(zip(*(positions(spec, axes) for axes in ((step.axis,), cut, shards)), strict=True))


def _at(shards: Sequence[Rows], shard: int) -> Rows:
    return shards[shard] if len(shards) > 1 else shards[0]


def over_boundaries(
    spec: Spec, plan: Plan, own: Iterable[Transfer], hidden: int
) -> Iterator[Traffic]:
    """What a rank sends and receives by its own transfers: activations of each micro-batch to the
    next stage and their gradients back, micro x sequence x hidden elements a call, of a slice of
    the tokens where tp has those between the blocks."""
    step = plan.pipeline
    assert step is not None
    tokens = spec.batch.micro * spec.batch.sequence
    if plan.tensor and plan.tensor.is_sequence:
        tokens //= spec.degree(plan.tensor.axis)
    size = tokens * hidden * spec.precision.effective.parameters.itemsize
    group = group_over(spec, (step.axis,))
    for each in own:
        calls = Calls(each.collective, State.ACTIVATIONS, each.phase, each.calls)
        yield calls.over(group, size)


def _of_stage(spec: Spec, made: Schedule, each: StageParts) -> list[list[Rows]]:
    """By index on tp what the ranks there send for a stage: of each shard where these differ."""
    times = partial(stage_gathers, made, each.stage.index)
    operators = tuple(tensor.sent(spec, each.plan, each.facts))
    found: dict[int, list[Rows]] = {}
    for local, indices in each.parts.items():
        moved, repeated = _kept(spec, each, indices[0])
        rows = add_traffic(
            (
                *wrapping(spec, each.plan, local).sent(times),
                *operators,
                *kept_traffic(spec, each.plan, moved, repeated),
            )
        )
        sums = tied_sums(spec, each.plan, local, each.stage)
        found |= {index: [(*rows, *more) for more in sums] for index in indices}
    return [found[index] for index in sorted(found)]


def _kept(spec: Spec, each: StageParts, index: int) -> tuple[Pairs, Pairs]:
    """What the modes of activations move and send again, of the rank at this place along tp."""
    if each.passes:
        passes = each.passes[index]
        return passes.moved, passes.repeated
    is_plain = all(kept.is_plain for kept in spec.activations.modes)
    if is_plain or not isinstance(spec.model, ModelShape) or not blocks.are_known(spec):
        return (), ()  # nothing, or not traced: then nothing is said of it
    return moved_and_repeated(spec, each.stage, each.cut(spec, index))
