"""Measure work of several ranks at once: each measurement starts on all ranks together and is
repeated.

Between two measurements a rank computes something else, as it does within a training step. Without
that, caches would hold the measured data and communication threads would have cores to themselves.

How much is measured: shapes and sizes, on processors, on GPUs, and to see that it works.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ptrain.rooms.world import World
from ptrain.spec.precision import DType

KIB, MIB = 2**10, 2**20
_MORE = 4  # times as many operations as of all combinations
_TINY = (1, 8, 8, 8)  # a dispatch, and next to nothing else

ProductShape = tuple[int, int, int, int]
AttentionShape = tuple[int, int, int, int]  # samples, heads, tokens, features of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Products with all combinations of `sides` of up to so many operations, by dtype, and `also`
    some; attention; bytes of operators, collectives and copies; (elements, tensors) of updates.
    `units`: wrapped units of the modules on which hooks are measured, `rounds` times; `late`:
    passes of a layer ahead of a collective."""

    sides: dict[DType, tuple[int, ...]]
    flops: dict[DType, float]
    also: tuple[ProductShape, ...]
    attention: tuple[AttentionShape, ...]
    sizes: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    sent: tuple[int, ...]
    copied: tuple[int, ...]
    most_of_others: int = 2**40  # bytes, in other dtypes than the first
    units: int = 8
    rounds: int = 9
    late: tuple[int, ...] = (1, 4, 16)

    def operator_sizes(self) -> list[tuple[int, DType]]:
        """Return the bytes of operators by dtype, smallest first."""
        first = next(iter(self.sides))
        return [
            (size, dtype)
            for size in self.sizes
            for dtype in self.sides
            if dtype is first or size <= self.most_of_others
        ]

    def products(self) -> list[tuple[DType, ProductShape]]:
        """Return the shapes, smallest first: what is left out for want of time is large."""
        shapes = [(dtype, shape) for dtype in self.sides for shape in self._of_dtype(dtype)]
        return sorted(shapes, key=lambda known: operations(known[1]))

    def _of_dtype(self, dtype: DType) -> Iterator[ProductShape]:
        sides = self.sides[dtype]
        yield _TINY
        yield from (
            (1, *shape)
            for shape in product(sides, sides, sides)
            if 2 * shape[0] * shape[1] * shape[2] <= self.flops[dtype]
        )
        yield from (shape for shape in self.also if operations(shape) <= _MORE * self.flops[dtype])


def factors_of(shape: ProductShape) -> int:
    """Numbers in both factors of a product."""
    matrices, rows, inner, columns = shape
    return matrices * (rows * inner + inner * columns)


def operations(shape: ProductShape) -> int:
    """Floating-point operations of a product."""
    matrices, rows, inner, columns = shape
    return 2 * matrices * rows * inner * columns


# Of the dtypes of `rates.measured.CALIBRATED`.
PROCESSORS = Points(
    sides={DType.FP32: (64, 128, 256, 512, 960, 1920), DType.BF16: (64, 256, 1024)},
    flops={DType.FP32: 5.4e8, DType.BF16: 1.4e8},
    also=(
        (1, 1024, 1024, 1024),
        (1, 512, 512, 4096),
        (1, 4096, 512, 512),
        (1, 512, 4096, 512),
        (1, 512, 256, 8192),
        (1, 8192, 512, 256),
        (16, 64, 32, 64),
        (16, 256, 32, 256),
        (16, 256, 256, 32),
        (64, 128, 64, 128),
    ),
    attention=(
        (16, 2, 32, 16),
        (4, 4, 64, 32),
        (2, 4, 128, 32),
        (2, 8, 128, 64),
        (4, 4, 256, 32),
        (2, 8, 256, 64),
        (1, 8, 1024, 64),
    ),
    sizes=(256, 4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 24 * MIB, 40 * MIB),
    updates=((64, 1), (16_384, 1), (10**6, 1), (4096, 64), (10**6, 64), (8 * 10**6, 8)),
    sent=(64, 4 * KIB, 64 * KIB, MIB, 16 * MIB),
    copied=(64, 64 * KIB, 8 * MIB),
    most_of_others=4 * MIB,
)
GPUS = Points(
    sides=dict.fromkeys((DType.BF16, DType.FP32), (256, 1024, 4096, 16384)),
    flops={DType.FP32: 3e11, DType.BF16: 2.2e12},
    also=(
        (128, 1024, 64, 1024),
        (128, 1024, 1024, 64),
        (32, 4096, 128, 4096),
        (1, 8192, 1024, 50_257),
        (1, 8192, 50_257, 1024),
        (1, 64, 4096, 16_384),
    ),
    attention=((8, 12, 1024, 64), (1, 32, 4096, 128), (1, 32, 8192, 128), (16, 8, 256, 64)),
    sizes=(KIB, 256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB),
    updates=((1024, 1), (10**6, 1), (16 * 10**6, 1), (10**6, 256), (256 * 10**6, 64)),
    sent=(KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
    copied=(64 * KIB, 4 * MIB, 256 * MIB),
)
BRIEF = Points(
    sides={DType.FP32: (16, 64)},
    flops={DType.FP32: 1e6},
    also=((4, 16, 16, 16),),
    attention=((2, 2, 16, 16),),
    sizes=(256, 64 * KIB),
    updates=((64, 1), (4096, 8)),
    sent=(64, 64 * KIB),
    copied=(4 * KIB,),
    units=2,
    rounds=3,
    late=(1,),
)


_SIDE, _PRODUCTS = 256, 4  # a millisecond or two of a processor


def compute(device: torch.device) -> None:
    """Compute for a while; on a GPU nothing, whose host waits for none of it."""
    if device.type == "cpu":
        factor = torch.ones(_SIDE, _SIDE)
        for _ in range(_PRODUCTS):
            factor @ factor


class _Computes(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        compute(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        compute(gradient.device)
        return gradient


class Between(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Computes in forward and in backward, and hands on what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed: torch.Tensor = _Computes.apply(x)
        return handed


Work = Callable[[], object]
Point = TypeVar("Point")

_ROUNDS, FEWEST = 5, 3
_ISSUES = 25  # of some tenths of a millisecond
_SECONDS = 0.004  # of a round
# In which of ranks that share cores each has had one for some slices of the scheduler.
_SHARED_SECONDS = 0.008
_LONG = 0.06  # seconds of all rounds, beyond which there are only the fewest
_MOST_CALLS = 2000
_MEETING_SECONDS, _MOST_MEETINGS = 0.3, 30  # of all meetings of one kind; of a round


class Bench:
    """The measurements of one rank; every rank makes the same ones in the same order. `turns`: how
    many ranks there are for a core, more than one where they share them. `spreads` are by table
    those of each: the middle half of its rounds over their median. `left_out`: how often the rest
    of a table's points was, for want of time. `patience`: how many times as many meetings of
    ranks, and rounds of wrapped modules, there are as usual.

    Of ranks that share cores the seconds of computing are a processor's, times the turns: so long
    it takes while all compute, however the system cuts that into slices, and whether others are
    done before."""

    def __init__(
        self, world: World, *, turns: float = 1.0, deadline: float, patience: float = 1.0
    ) -> None:
        self.world, self.deadline, self.patience = world, deadline, patience
        self.table, self.limit, self.left_out = "", deadline, 0
        self.turns = turns
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
        for place in range(round(number * self.patience)):
            if place >= FEWEST and self.is_late:
                return
            yield place

    def seconds(self, work: Work, *, parts: int = 1) -> float:
        """Return the median seconds of one of the `parts` that `work` has, all of them alike."""
        estimate = self.agreed(self._timed(work, 1))  # and what is set up in a first call
        if estimate < _SECONDS:
            estimate = self.agreed(self._timed(work, 1))
        calls = round(min(max(1, _SECONDS / max(estimate, 1e-9)), _MOST_CALLS))
        is_long = calls * estimate * _ROUNDS > _LONG and calls == 1
        number = int(self.agreed(-calls if is_long or self._is_over else calls))
        rounds = FEWEST if number < 0 else _ROUNDS
        samples = [self._timed(work, abs(number)) for _ in range(rounds)]
        return self.noted(samples) / parts

    def issuing_seconds(self, work: Work) -> float:
        """Return the median seconds in which the host issues a call, for which it never waits: each
        begins with an empty queue, which holds what few calls issue."""
        self._timed(work, FEWEST)
        return self.noted([self._issued(work) for _ in range(_ISSUES)])

    def _issued(self, work: Work) -> float:
        self.settle()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    @property
    def is_shared(self) -> bool:
        """Whether ranks take turns on a core."""
        return self.turns > 1

    def host_seconds(self) -> float:
        """Return what the clock says of this thread's own work: it goes on while the thread waits,
        unless ranks take turns."""
        return self.turns * time.thread_time() if self.is_shared else time.perf_counter()

    def busy_seconds(self, work: Work, *, parts: int = 1) -> float:
        """Return the same of work that meets no other rank. Where ranks share cores each goes on up
        to a moment that is all ranks': caches are as full as while all compute."""
        if not self.is_shared:
            return self.seconds(work, parts=parts)
        began = time.perf_counter()
        work()
        window = self.agreed(max(_SHARED_SECONDS, time.perf_counter() - began))
        self.together()
        began = time.perf_counter()
        ends = [began + number * window for number in range(1, FEWEST + 1)]
        return self.noted([self._up_to(end, work) for end in ends]) / parts

    def meeting_seconds(self, work: Work, *, parts: int = 1, between: Work | None = None) -> float:
        """Return the seconds of one part of work in which ranks meet, after each of them has
        computed by itself as between the collectives of a step: for a while, or what is given. On
        processors a call is over at once or, where a thread that sends finds no free core, a slice
        of the scheduler later: the mean is what many of them take, and no median of calls is. Of
        several means the median: what else runs on the machine may stop one of them for longer
        than all others take.

        Where ranks take turns, who waits leaves its core to those that still compute: a meeting
        then takes what computing and meeting take beyond computing alone."""
        if self.device.type == "cuda":
            return self.seconds(work, parts=parts)
        if self.is_shared:
            return self.seconds_beside(lambda: nullcontext(work), parts=parts, between=between)
        between = between or self._compute
        calls = self._meetings(work, between)
        means = [self._alternating(work, calls, between) for _ in range(_ROUNDS)]
        return self.noted(means) / parts

    def seconds_beside(
        self,
        works: Callable[[], AbstractContextManager[Work]],
        *,
        parts: int = 1,
        between: Work | None = None,
    ) -> float:
        """Return what a rank that computes again and again takes more for one part of work done
        each time. `works` gives the work of a round, of which a call may leave to the next ones
        what it began. On a GPU, whose host waits for none of its computing: of the work alone."""
        if self.device.type == "cuda":
            with works() as work:
                return self.seconds(work, parts=parts)
        between = between or self._compute
        with works() as work:
            calls = self._meetings(work, between)
        more = []
        for _ in range(_ROUNDS):
            self.together()
            own, began = 0.0, time.perf_counter()
            with works() as work:
                for _ in range(calls):
                    before = time.thread_time()
                    between()
                    own += time.thread_time() - before
                    work()
            more.append((time.perf_counter() - began - self.turns * own) / calls)
        return self.noted(more) / parts

    def _compute(self) -> None:
        compute(self.device)

    def _alternating(self, work: Work, calls: int, between: Work) -> float:
        taken = 0.0
        for _ in range(calls):
            between()
            began = time.perf_counter()
            work()
            taken += time.perf_counter() - began
        return taken / calls

    def _meetings(self, work: Work, between: Work) -> int:
        """How many of them there are in a round."""
        estimate = self._timed(work, FEWEST) + self._timed(between, FEWEST)
        most = FEWEST if self._is_over else round(_MOST_MEETINGS * self.patience)
        seconds = _MEETING_SECONDS * self.patience
        calls = min(max(round(seconds / (_ROUNDS * estimate)), FEWEST), most)
        return int(self.agreed(calls))  # one rank's clock decides for all

    def noted(self, samples: list[float]) -> float:
        """Return the median of the rounds, and keep their spread."""
        median = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4)
        spread = (high - low) / median if median > 0 else 0.0
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

    def _up_to(self, end: float, work: Work) -> float:
        """A call's, of a processor's seconds and as many turns as all take."""
        busy, calls = time.process_time(), 0
        while not calls or time.perf_counter() < end:
            work()
            calls += 1
        return self.turns * (time.process_time() - busy) / calls

    def _timed(self, work: Work, calls: int) -> float:
        self.together()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self.settle()
        return (time.perf_counter() - began) / calls


Rows = Iterator[tuple[tuple[Any, ...], float]]  # what was measured, and its seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """How rows of one table of rates come about, in a `share` of the time. `points`: of what there
    is a measurement, those first that take least; of them at `least` so many are measured. `rows`:
    sets one of them up and times it."""

    table: str
    share: float
    points: Callable[[Bench, Points], Iterable[Any]] = lambda _, points: (points,)
    least: int = 1
    rows: Callable[[Bench, Any], Rows]

    def measured(self, bench: Bench, points: Points) -> Rows:
        """Yield the rows of as many points as there is time for."""
        for point in bench.in_time(self.points(bench, points), least=self.least):
            yield from self.rows(bench, point)
