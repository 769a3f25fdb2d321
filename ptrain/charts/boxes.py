"""A schedule's timeline as boxes: which part of a picture each action fills. Torch-free.

Time runs to the right, a rank is a row one high, and the first rank's is on top. The halves of a
pair lie above each other, each as long as the pair and half as high: they run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.axes.pipeline.simulate import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Of one action: from `start` to `end` in the simulation's units of time, from `top` to
    `bottom` in rows. `shade` is its stage's place among those of its rank, forward."""

    action: Action
    rank: int
    shade: int
    start: float
    end: float
    top: float
    bottom: float

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def area(self) -> float:
        """Rank-units of time; what is left of a row is idle."""
        return self.length * (self.bottom - self.top)

    @property
    def is_half(self) -> bool:
        """Of a pair."""
        return self.bottom - self.top < 1


def boxes(schedule: Schedule, simulation: Simulation) -> Iterator[Box]:
    """Rank by rank, in the order in which they run."""
    for rank, spans in enumerate(simulation.timeline):
        stages = schedule.stages_of(rank)
        for span in spans:
            parts = span.step.parts
            for place, action in enumerate(parts):
                yield Box(
                    action=action,
                    rank=rank,
                    shade=stages.index(action.stage),
                    start=span.start,
                    end=span.end,
                    top=rank + place / len(parts),
                    bottom=rank + (place + 1) / len(parts),
                )
