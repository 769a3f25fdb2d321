"""A stopwatch for ranks that compute at once: each measurement begins together and is repeated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ptrain.calibration.between import compute
from ptrain.rooms.world import World

Work = Callable[[], object]
Point = TypeVar("Point")

_ROUNDS, FEWEST = 5, 3
_SECONDS = 0.004  # of a round
# Of ranks that share cores a round must see many time slices of the scheduler, not a part of one.
_SHARED_SECONDS = 0.04
_LONG = 0.06  # seconds of all rounds, beyond which there are only the fewest
_MOST_CALLS = 2000
_MEETING_SECONDS, _MOST_MEETINGS = 0.3, 10  # of all meetings of one kind; of a round


class Bench:
    """The measurements of one rank; every rank makes the same ones in the same order. `spreads` are
    by table those of each: the middle half of its rounds over their median. `left_out`: how often
    the rest of a table's points was, for want of time."""

    def __init__(self, world: World, *, is_shared: bool, deadline: float) -> None:
        self.world, self.deadline = world, deadline
        self.table, self.limit, self.left_out = "", deadline, 0
        self.is_shared = is_shared
        self.round_seconds = _SHARED_SECONDS if is_shared else _SECONDS
        self.spreads: dict[str, list[float]] = {}
        self._began = time.monotonic()

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def is_late(self) -> bool:
        """Whether the table's time is over: rank 0's clock decides. What cannot be left out is then
        measured as few times as can be."""
        return bool(self.agreed(self._is_over))

    @property
    def _is_over(self) -> bool:
        return time.monotonic() - self._began > self.limit

    def begin(self, table: str, until: float) -> None:
        """Begin a table, whose time is over when that share of all is."""
        self.table, self.limit = table, until * self.deadline

    def in_time(self, points: Iterable[Point], *, least: int = 2) -> Iterator[Point]:
        """Yield points, the smallest of which come first, up to when the table's time is over; some
        in any case."""
        for number, point in enumerate(points):
            if number >= least and self.is_late:
                self.left_out += 1
                return
            yield point

    def rounds(self, number: int) -> Iterator[int]:
        """Yield the numbers of rounds of one measurement, as many of them as there is time for."""
        for place in range(number):
            if place >= FEWEST and self.is_late:
                return
            yield place

    def seconds(self, work: Work, *, parts: int = 1) -> float:
        """Return the median seconds of one of the `parts` that `work` has, all of them alike."""
        estimate = self.agreed(self._timed(work, 1))  # and what is set up in a first call
        if estimate < self.round_seconds:
            estimate = self.agreed(self._timed(work, 1))
        calls = round(min(max(1, self.round_seconds / max(estimate, 1e-9)), _MOST_CALLS))
        is_long = calls * estimate * _ROUNDS > _LONG and calls == 1
        number = int(self.agreed(-calls if is_long or self._is_over else calls))
        rounds = FEWEST if number < 0 else _ROUNDS
        samples = [self._timed(work, abs(number)) for _ in range(rounds)]
        return self.noted(samples) / parts

    def busy_seconds(self, work: Work, *, parts: int = 1) -> float:
        """Return the same of work that meets no other rank. Where ranks share cores each goes on up
        to a moment that is all ranks': else who is done first leaves its core to the others, and
        the last ones would seem to be faster than they are while all compute."""
        if not self.is_shared:
            return self.seconds(work, parts=parts)
        estimate = self.agreed(self._timed(work, 1))
        window = max(self.round_seconds, 2 * self.agreed(self._timed(work, 1)), estimate)
        return self.noted([self._within(work, window) for _ in range(FEWEST)]) / parts

    def meeting_seconds(self, work: Work, *, parts: int = 1) -> float:
        """Return the seconds of one part of work in which ranks meet, after each of them has
        computed by itself as between the collectives of a step. On processors a call is over at
        once or, where a thread that sends finds no free core, a slice of the scheduler later: the
        mean is what many of them take, and no median of calls is. Of several means the median:
        what else runs on the machine may stop one of them for longer than all others take."""
        if self.device.type == "cuda":
            return self.seconds(work, parts=parts)
        between = partial(compute, self.device)
        estimate = self.agreed(self._timed(work, FEWEST) + self._timed(between, FEWEST))
        most = FEWEST if self._is_over else _MOST_MEETINGS
        calls = min(max(round(_MEETING_SECONDS / (_ROUNDS * estimate)), FEWEST), most)
        calls = int(self.agreed(calls))  # one rank's clock decides for all
        self.together()
        means = []
        for _ in range(_ROUNDS):
            taken = 0.0
            for _ in range(calls):
                between()
                began = time.perf_counter()
                work()
                taken += time.perf_counter() - began
            means.append(taken / calls)
        return self.noted(means) / parts

    def noted(self, samples: list[float]) -> float:
        """Return the median of the rounds, and keep their spread."""
        median = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4)
        spread = (high - low) / median if median else 0.0
        self.spreads.setdefault(self.table, []).append(spread)
        return median

    def together(self) -> None:
        """Begin when all ranks do, with nothing left to do."""
        self.settle()
        if self.world.size > 1:
            dist.barrier()

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agreed(self, value: float) -> float:
        """Return rank 0's value."""
        if self.world.size == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(held, src=0)
        return float(held)

    def _within(self, work: Work, seconds: float) -> float:
        self.together()
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            work()
            calls += 1
        return (time.perf_counter() - began) / calls

    def _timed(self, work: Work, calls: int) -> float:
        self.together()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self.settle()
        return (time.perf_counter() - began) / calls


class RateSheet:
    """What a rank measured: seconds by table and by what was measured."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[tuple[Any, ...], float]] = {}

    def note(self, table: str, *key: Any, seconds: float) -> None:
        """Write a measurement down. No time is nothing: a difference may come out as that."""
        plain = tuple(str(cell) if isinstance(cell, str) else cell for cell in key)
        self.tables.setdefault(table, {})[plain] = max(seconds, 1e-9)
