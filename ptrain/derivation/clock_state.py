"""What a clock notes: what lies on its lanes, what is on its way, and how far everything is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ptrain.costs import TimeKey

Seconds = dict[TimeKey, float]


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Something on a lane, from when to when; None is the lane of the rank itself."""

    lane: Hashable
    key: TimeKey
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something that is on its way, and there `at` a moment, until which somebody may wait."""

    spend_until: Callable[[TimeKey, float], None]
    key: TimeKey
    at: float

    def wait(self) -> None:
        """The rank has nothing to do until it is there."""
        self.spend_until(self.key, self.at)


@dataclass(frozen=True, slots=True)
class ClockState:
    """A clock's state, to which it can go back; `met`: its own seconds at the last collective."""

    now: float
    free: dict[Hashable, float]
    own: Seconds
    moving: Seconds
    spans: tuple[LaneSpan, ...]
    met: float
