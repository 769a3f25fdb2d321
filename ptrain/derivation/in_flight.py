"""The micro-batches in flight on every rank of a pipeline, and the peaks: each rank's step replayed
once for all ranks that have the same parts of the same stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptrain.algebra.layout import positions, ranks_over
from ptrain.axes.pipeline.instructions import training
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.costs import Footprint, Peak, Phase, State
from ptrain.derivation.differing import differing_axes
from ptrain.derivation.kept import activation_row
from ptrain.derivation.pipeline import StageParts
from ptrain.derivation.stage_replay import Part, Played, play_rank
from ptrain.derivation.stage_timeline import passes
from ptrain.derivation.timeline import play_update
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec

_LIVES = (State.PARAMETERS, State.OPTIMIZER, State.OTHER)  # for the whole step


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Rows of activations and of gathered units, and the peaks, by rank."""

    memory: tuple[Footprint, ...]
    peaks: tuple[Peak, ...]


def in_flight(
    spec: Spec, made: Schedule, stages: Sequence[StageParts], base: Sequence[Footprint]
) -> Flight:
    """`base` are the resident rows."""
    lives = dict.fromkeys(range(spec.world_size), 0)
    for row in base:
        if row.state in _LIVES:
            lives[row.rank] += row.device_bytes
    played: dict[tuple[int, tuple[int, ...]], _Rank] = {}
    instructions = training(made)
    memory: list[Footprint] = []
    peaks: list[Peak] = []
    places = zip(positions(spec, (Axis.PP,)), positions(spec, (Axis.TP,)), strict=True)
    for rank, (place, index) in enumerate(places):
        own = [stages[stage] for stage in made.stages_of(place)]
        # ranks of tp with the same parts: the first of them stands for all
        alike = tuple(next(p for p in each.parts.values() if index in p)[0] for each in own)
        if (place, alike) not in played:
            parts = [_part(spec, each, made.stages, index) for each in own]
            played[place, alike] = _Rank(
                spec, play_rank(spec, parts, instructions[place], made.stages - 1)
            )
        found = played[place, alike]
        memory += found.rows(rank)
        peaks += [
            Peak(phase=phase, rank=rank, device_bytes=lives[rank] + above)
            for phase, above in found.above(rank).items()
        ]
    return Flight(memory=tuple(memory), peaks=tuple(peaks))


class _Rank:
    """A step up to the update, and the updates of ranks with different shards."""

    def __init__(self, spec: Spec, played: Played) -> None:
        self.played, self.tape = played, played.tape
        axes = differing_axes(played.wraps[0].scene.plan)
        self.shards = positions(spec, axes)
        self.tape.enter(Phase.UPDATE)
        self.updates = play_update(played.wraps, range(ranks_over(spec, axes)))

    def rows(self, rank: int) -> Iterator[Footprint]:
        played = self.played
        yield activation_row(rank, played.activations, played.moved)
        yield Footprint(state=State.TRANSIENT, rank=rank, device_bytes=played.gathered)

    def above(self, rank: int) -> dict[Phase, int]:
        """The peaks above what lives always."""
        return {**self.tape.peaks, Phase.UPDATE: self.updates[self.shards[rank]]}


def _part(spec: Spec, each: StageParts, stages: int, index: int) -> Part:
    facts = each.of(index)
    if each.passes:
        known = each.passes[index]
    else:
        known = passes(spec, each.stage, stages, facts.unit_modules, each.cut(spec, index))
    return Part(index=each.stage.index, plan=each.plan, facts=facts, passes=known)
