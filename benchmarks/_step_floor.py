"""A bound of a step's time from below: what is computed in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ptrain.derivation.clock import Clock
from ptrain.derivation.interconnect import Network
from ptrain.facts.model import LayerWork, ModelWork, PassWork
from ptrain.rates.pace import around
from ptrain.selection.choose import Chooser
from ptrain.spec.activations import PLAIN
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind


@dataclass
class StepFloor:
    """Seconds than which no step of a candidate is shorter: of a pipeline's ranks one computes at
    least its share of what all of them do, in each micro-batch and pass by pass as long as the
    clock of `exact` takes for it, whatever it waits for besides."""

    chooser: Chooser
    known: dict[int, tuple[ModelWork, float]] = field(default_factory=dict)

    def of(self, spec: Spec) -> float:
        """Return those of a candidate's spec."""
        work = self.chooser.work(spec)
        if id(work) not in self.known:
            self.known[id(work)] = work, self._seconds(spec, work)
        return spec.batch.accumulate * self.known[id(work)][1] / spec.degree(Axis.PP)

    def _seconds(self, spec: Spec, work: ModelWork) -> float:
        pace = self.chooser.search.task.pace
        clock = Clock(pace, Network(spec), Axis.TP if spec.degree(Axis.TP) > 1 else None)
        kept = (PLAIN, *spec.activations.of(len(work.layers)), PLAIN)
        layers = (work.front, *work.layers, work.behind)
        return sum(
            clock.pass_seconds(layer.forward, around(way, Kind.FORWARD)).in_a_row(pace)
            + min(
                sum(
                    clock.pass_seconds(half, around(way, kind)).in_a_row(pace)
                    for half, kind in parts
                )
                for parts in _backwards(layer)
            )
            for layer, way in zip(layers, kept, strict=True)
        )


def _backwards(layer: LayerWork) -> Iterator[tuple[tuple[PassWork, Kind], ...]]:
    """Yield in which parts its backward pass may be computed."""
    yield ((layer.backward, Kind.BACKWARD),)
    if layer.inputs or layer.weights:
        yield (layer.inputs, Kind.INPUT), (layer.weights, Kind.WEIGHT)
