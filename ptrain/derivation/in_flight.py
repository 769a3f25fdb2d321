"""The micro-batches in flight on every rank of a pipeline, and the peaks: each rank's step replayed
once for all ranks that have the same parts of the same stages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from ptrain.axes.pipeline.instructions import training
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.by_rank import ByRank, rows_by_rank
from ptrain.costs import Footprint, Peak, Phase, State, StepTime, Traffic
from ptrain.derivation.activation_moves import activation_row
from ptrain.derivation.differing import differing_axes
from ptrain.derivation.layers import passes
from ptrain.derivation.pipeline import StageParts
from ptrain.derivation.pipeline_time import PipelineTiming, RankTime, pipeline_time
from ptrain.derivation.repeats import represent
from ptrain.derivation.stage_replay import Part, Played, play_rank
from ptrain.derivation.timeline import always, peaks, play_update
from ptrain.spec.axis import Axis
from ptrain.spec.layout import positions, ranks_over
from ptrain.spec.spec import Spec
from ptrain.steps.experts import ByLayer

Place = tuple[int, int, int]  # along pp, along tp, and of a rank's tokens where these differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Rows of activations and of gathered units, and the peaks, by rank."""

    memory: ByRank[Footprint]
    peaks: ByRank[Peak]
    step: StepTime | None = None


def in_flight(
    spec: Spec,
    schedule: Schedule,
    stages: Sequence[StageParts],
    base: ByRank[Footprint],
    timing: PipelineTiming | None = None,
    stands_for: Mapping[int, int] | None = None,
) -> Flight:
    """`base` are the resident rows; where `timing` is given clocks go along. `stands_for`: which
    place along pp is played for each, itself where nothing is said."""
    played: dict[Place, _Rank] = {}
    like: dict[Place, Place] = {}
    first: dict[Hashable, Place] = {}
    instructions, parts = training(schedule), _PartsOfStages(spec, stages, timing)
    cutting, loads = stages[0].plan.cutting_axes, stages[0].plan.loads
    axes = (Axis.PP,), cutting, spec.routing_axes if loads else ()
    places = list(zip(*(positions(spec, names) for names in axes), strict=True))
    for place, index, tokens in sorted(set(places)):
        stand_in = stands_for[place] if stands_for else place
        own = schedule.stages_of(stand_in)
        rows = loads.of(tokens) if loads else None
        # ranks with the same parts: the first of them stands for all
        alike = stand_in, id(rows), *(parts.first_of(stage, index) for stage in own)
        key = like[place, index, tokens] = first.setdefault(alike, (place, index, tokens))
        if key not in played:
            of_rank = [parts.of(stage, index, rows) for stage in own]
            clock = timing.clock.another() if timing else None
            step = play_rank(spec, of_rank, instructions[stand_in], schedule.stages - 1, clock)
            sums = [row for stage in own for row in stages[stage].tied(index)] if clock else []
            played[key] = _Rank(spec, step, sums)
    ranks = [like[place] for place in places]
    shards = positions(spec, differing_axes(stages[0].plan))
    keys = [(rank, played[rank].updates[s]) for rank, s in zip(ranks, shards, strict=True)]
    above = {key: played[key[0]].above(update=key[1]) for key in dict.fromkeys(keys)}
    return Flight(
        memory=rows_by_rank(ranks, lambda rank: played[rank].rows()),
        peaks=peaks(always(base), keys, above),
        step=pipeline_time(schedule, _timed(played), timing) if timing else None,
    )


def fullest_of(schedule: Schedule, stages: Sequence[StageParts]) -> dict[int, int]:
    """Return by place along pp who stands for it where the fullest rank is asked for: of those
    with equal stages the first and the last, since from rank to rank there is more in flight, or
    less."""
    groups: dict[Hashable, list[int]] = {}
    for place in range(schedule.ranks):
        equal = tuple(stages[stage].like for stage in schedule.stages_of(place))
        groups.setdefault(equal, []).append(place)
    return {
        place: place if place == group[-1] else group[0]
        for group in groups.values()
        for place in group
    }


def _timed(played: Mapping[Place, _Rank]) -> list[RankTime]:
    """The times of ranks of each place along pp, of each part of the model along tp."""
    return [
        RankTime(
            place=place,
            seconds=rank.played.seconds,
            tails=rank.played.tails,
            passes=rank.passes,
            clock=rank.clock,
        )
        for (place, *_), rank in played.items()
        if rank.clock is not None
    ]


class _Rank:
    """A step up to the update, and the updates of ranks with different shards."""

    def __init__(self, spec: Spec, played: Played, sums: Sequence[Traffic] = ()) -> None:
        """`sums` are those of tensors that the first and the last stage share."""
        self.played, self.tape, self.clock = played, played.tape, played.tape.clock
        axes = differing_axes(played.wraps[0].scene.plan)
        self.passes = self.clock.seconds if self.clock else 0.0
        self.tape.enter(Phase.UPDATE)
        if self.clock is not None:
            for row in sums:
                self.clock.between_ends(row.key.collective, Axis.PP, row.payload_bytes)
        self.updates = play_update(played.wraps, range(ranks_over(spec, axes)))

    def rows(self) -> tuple[Footprint, ...]:
        played = self.played
        return (
            activation_row(0, played.activations, played.moved),
            Footprint(state=State.TRANSIENT, rank=0, device_bytes=played.gathered),
        )

    def above(self, *, update: int) -> dict[Phase, int]:
        """The peaks above what lives always, with one of its updates."""
        return {**self.tape.peaks, Phase.UPDATE: update}


class _PartsOfStages:
    """What the ranks have of the stages, equal stages taken apart once."""

    def __init__(
        self, spec: Spec, stages: Sequence[StageParts], timing: PipelineTiming | None
    ) -> None:
        self.spec, self.stages, self.timing = spec, stages, timing
        self.known: dict[tuple[int, int], Part] = {}

    def first_of(self, stage: int, index: int) -> int:
        """The first rank along tp that has the same part of a stage."""
        return self.stages[stage].of(index)[1]

    def of(self, stage: int, index: int, rows: ByLayer | None = None) -> Part:
        """The part of a stage that the rank at this place along tp has, whose tokens send and get
        these rows."""
        like = self.stages[stage].like
        if (like, index) not in self.known:
            self.known[like, index] = self._part(self.stages[like], index)
        # what a pass did is known to all of them: it depends on the wrap's signature alone
        part = replace(self.known[like, index], index=stage)
        if micro_batches := self.stages[stage].micro_batches(index, rows):
            return replace(part, micro_batches=micro_batches, known={})
        return part

    def _part(self, taken: StageParts, index: int) -> Part:
        spec, stage, (ghost, _) = self.spec, taken.stage, taken.of(index)
        if taken.passes:
            played, known = None, taken.passes[index]
        else:
            played = represent(spec, ghost.wrapped.facts.units, stage.layers, ghost.reach)
            known = passes(spec, stage, len(self.stages), played, taken.cut(spec, index))
        units = played.units if played else ghost.wrapped.facts.units
        return Part(
            index=stage.index,
            ghost=ghost,
            passes=known,
            representatives=played,
            scores=self.timing.scores(stage, index, played, units, known) if self.timing else {},
        )
