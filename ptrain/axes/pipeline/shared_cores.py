"""A schedule on cores that its ranks share: who waits leaves them to the others.

What a step takes is known for the case that all ranks are busy. While fewer are, each is faster,
by a factor that a machine's rates say. So a step has a number of seconds to do, of which more is
done in a second while others wait.
"""

from __future__ import annotations

from collections.abc import Callable

from ptrain.axes.pipeline.proof import step_work
from ptrain.axes.pipeline.schedule import Action, Schedule, Step
from ptrain.axes.pipeline.simulate import Durations, Simulation, Span

_NOTHING = 1e-12  # of a step's seconds: done


def simulate_sharing(
    schedule: Schedule, costs: Durations, speed: Callable[[int], float]
) -> Simulation:
    """Return when the steps start and end of a schedule that is one, of which `simulate` convinces.
    `speed` says by how many ranks are busy how much faster each is than with all of them; what is
    sent takes its sender's time. O(steps x ranks)."""
    assert costs.covers(schedule), "costs of other stages than the schedule's"
    assert not costs.communication, "what is sent takes its sender's time"
    return _Sharing(schedule, costs, speed).to_the_end()


class _Sharing:
    """How far each rank is; `left` of the seconds of what it does now, since `begun`."""

    def __init__(self, schedule: Schedule, costs: Durations, speed: Callable[[int], float]) -> None:
        self.schedule, self.costs, self.speed = schedule, costs, speed
        self.needs = step_work(schedule).needs
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]
        self.left: dict[int, float] = {}
        self.begun: dict[int, float] = {}
        self.ended: set[Action] = set()
        self.now = 0.0

    def to_the_end(self) -> Simulation:
        while self._begin():
            factor = self.speed(len(self.left))
            least = min(self.left.values())
            self.now += least / factor
            for rank in [*self.left]:
                self.left[rank] -= least
                if self.left[rank] <= _NOTHING:
                    self._end(rank)
        return Simulation(timeline=tuple(tuple(spans) for spans in self.spans))

    def _begin(self) -> bool:
        """Every rank that can begins; returns whether any is busy."""
        for rank in range(self.schedule.ranks):
            step = self._next(rank)
            if rank in self.left or step is None:
                continue
            if all(need in self.ended for need in self.needs(step)):
                self.left[rank], self.begun[rank] = self.costs.of(step), self.now
        return bool(self.left)

    def _next(self, rank: int) -> Step | None:
        done, order = len(self.spans[rank]), self.schedule.orders[rank]
        return order[done] if done < len(order) else None

    def _end(self, rank: int) -> None:
        step = self._next(rank)
        assert step is not None, "what is busy does something"
        self.spans[rank].append(Span(step=step, start=self.begun[rank], end=self.now))
        del self.left[rank], self.begun[rank]
        self.ended.update(step.parts)
