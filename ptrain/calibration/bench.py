"""Time work on several ranks at once: all ranks start each measurement together and repeat it.

Between two measurements a rank computes something else, as in a training step. Otherwise caches
would hold the measured data, and communication threads would have idle cores.

`Points` are the shapes and sizes to measure: on CPUs, on GPUs, and a brief set for tests.
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

from ptrain.runtime.world import World
from ptrain.spec.precision import DType

KIB, MIB = 2**10, 2**20
_ALSO_FACTOR = 4  # `extra_products` may have this many times the operations of the combinations
_TINY = (1, 8, 8, 8)  # measures the dispatch of an operator

ProductShape = tuple[int, int, int, int]
AttentionShape = tuple[int, int, int, int]  # samples, heads, tokens, features per head


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """The shapes and sizes to measure.

    Attributes:
        side_lengths: By dtype, the side lengths whose combinations are the products.
        flops: By dtype, the most operations of a product; larger ones are left out.
        extra_products: More products, up to four times as many operations.
        attention: Shapes of attention.
        sizes: Bytes of memory-bound operators.
        updates: Elements and number of tensors of an update.
        collective_sizes: Bytes of collectives.
        copy_sizes: Bytes of copies between tiers.
        other_dtypes_max_bytes: Most bytes of operators in dtypes other than the first.
        units: Wrapped units of the modules on which hooks are measured.
        rounds: Rounds of each measurement of hooks.
        late_passes: Numbers of a layer's passes before a collective.
    """

    side_lengths: dict[DType, tuple[int, ...]]
    flops: dict[DType, float]
    extra_products: tuple[ProductShape, ...]
    attention: tuple[AttentionShape, ...]
    sizes: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    collective_sizes: tuple[int, ...]
    copy_sizes: tuple[int, ...]
    other_dtypes_max_bytes: int = 2**40  # bytes
    units: int = 8
    rounds: int = 9
    late_passes: tuple[int, ...] = (1, 4, 16)

    def operator_sizes(self) -> list[tuple[int, DType]]:
        """Return bytes and dtype of the memory-bound operators, smallest first."""
        first = next(iter(self.side_lengths))
        return [
            (size, dtype)
            for size in self.sizes
            for dtype in self.side_lengths
            if dtype is first or size <= self.other_dtypes_max_bytes
        ]

    def list_products(self) -> list[tuple[DType, ProductShape]]:
        """Return dtype and shape of the products, smallest first.

        The largest are left out if time is short.
        """
        shapes = [
            (dtype, shape) for dtype in self.side_lengths for shape in self._products_of(dtype)
        ]
        return sorted(shapes, key=lambda known: count_flops(known[1]))

    def _products_of(self, dtype: DType) -> Iterator[ProductShape]:
        """Yield the products of a dtype."""
        sides = self.side_lengths[dtype]
        yield _TINY
        yield from (
            (1, *shape)
            for shape in product(sides, sides, sides)
            if 2 * shape[0] * shape[1] * shape[2] <= self.flops[dtype]
        )
        yield from (
            shape
            for shape in self.extra_products
            if count_flops(shape) <= _ALSO_FACTOR * self.flops[dtype]
        )


def count_factor_elements(shape: ProductShape) -> int:
    """Return the number of elements in both factors of a product."""
    matrices, rows, inner, columns = shape
    return matrices * (rows * inner + inner * columns)


def count_flops(shape: ProductShape) -> int:
    """Return the number of floating-point operations of a product."""
    matrices, rows, inner, columns = shape
    return 2 * matrices * rows * inner * columns


# Dtypes as in `rates.measured.CALIBRATED`.
PROCESSORS = Points(
    side_lengths={DType.FP32: (64, 128, 256, 512, 960, 1920), DType.BF16: (64, 256, 1024)},
    flops={DType.FP32: 5.4e8, DType.BF16: 1.4e8},
    extra_products=(
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
    collective_sizes=(64, 4 * KIB, 64 * KIB, MIB, 16 * MIB),
    copy_sizes=(64, 64 * KIB, 8 * MIB),
    other_dtypes_max_bytes=4 * MIB,
)
GPUS = Points(
    side_lengths=dict.fromkeys((DType.BF16, DType.FP32), (256, 1024, 4096, 16384)),
    flops={DType.FP32: 3e11, DType.BF16: 2.2e12},
    extra_products=(
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
    collective_sizes=(KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
    copy_sizes=(64 * KIB, 4 * MIB, 256 * MIB),
)
BRIEF = Points(
    side_lengths={DType.FP32: (16, 64)},
    flops={DType.FP32: 1e6},
    extra_products=((4, 16, 16, 16),),
    attention=((2, 2, 16, 16),),
    sizes=(256, 64 * KIB),
    updates=((64, 1), (4096, 8)),
    collective_sizes=(64, 64 * KIB),
    copy_sizes=(4 * KIB,),
    units=2,
    rounds=3,
    late_passes=(1,),
)


_SIDE, _PRODUCTS = 256, 4  # one or two milliseconds on a CPU


def compute(device: torch.device) -> None:
    """Compute for a millisecond or two on a CPU. A GPU computes nothing."""
    if device.type == "cpu":
        factor = torch.ones(_SIDE, _SIDE)
        for _ in range(_PRODUCTS):
            factor @ factor


class _ComputeInPasses(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The identity, which computes for a while in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        compute(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        compute(gradient.device)
        return gradient


class ComputingIdentity(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A module that returns its input and computes for a while in forward and in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed: torch.Tensor = _ComputeInPasses.apply(x)
        return handed


Work = Callable[[], object]
Point = TypeVar("Point")

_ROUNDS, FEWEST = 5, 3
_ISSUES = 25  # calls of some tenths of a millisecond each
_SECONDS = 0.004  # duration of a round
# If ranks share cores, each has had a core for several scheduler slices in this time.
_SHARED_SECONDS = 0.008
_LONG = 0.06  # seconds of all rounds; longer measurements have `FEWEST` rounds
_MAX_CALLS = 2000
# seconds of all meetings of one kind; meetings of a round
_MEETING_SECONDS, _MOST_MEETINGS = 0.3, 30


class Bench:
    """The stopwatch of one rank. All ranks make the same measurements in the same order.

    If ranks share cores, the seconds of computation are CPU seconds times `turns`: the time that it
    takes while all ranks compute, independent of the scheduler's slices and of ranks that finish
    early.

    Attributes:
        turns: Ranks per core, at least 1.
        spreads: By table, the interquartile range of each measurement's rounds over their median.
        left_out: Number of tables whose last points were left out because time was short.
        patience: Factor of the usual number of meetings, and of rounds of wrapped modules.
    """

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
        """True if the current table's time is over, by rank 0's clock.

        Required measurements are then repeated as few times as possible.
        """
        return bool(self.broadcast_value(self._is_over))

    @property
    def _is_over(self) -> bool:
        """True if the current table's time is over, by this rank's clock."""
        return time.monotonic() - self._began > self.limit

    def begin_table(self, table: str, until: float) -> None:
        """Begin a table, whose time is over at the share `until` of the full time."""
        self.table, self.limit = table, until * self.deadline

    def iter_in_time(self, points: Iterable[Point], *, least: int = 2) -> Iterator[Point]:
        """Yield points until the table's time is over, at least `least`, the smallest first."""
        for number, point in enumerate(points):
            if number >= least and self.is_late:
                self.left_out += 1
                return
            yield point

    def iter_rounds(self, number: int) -> Iterator[int]:
        """Yield the round numbers of one measurement.

        There are `number` times `patience`, fewer if time is short.
        """
        for place in range(round(number * self.patience)):
            if place >= FEWEST and self.is_late:
                return
            yield place

    def seconds(self, work: Work, *, parts: int = 1) -> float:
        """Return the median seconds of one of the `parts` equal parts of `work`."""
        estimate = self.broadcast_value(
            self._seconds_per_call(work, 1)
        )  # includes the setup of a first call
        # the first call of short work was mostly setup, so time it again
        if estimate < _SECONDS:
            estimate = self.broadcast_value(self._seconds_per_call(work, 1))
        calls = round(min(max(1, _SECONDS / max(estimate, 1e-9)), _MAX_CALLS))
        # Short work is repeated within a round; only long single calls get fewer rounds.
        is_long = calls * estimate * _ROUNDS > _LONG and calls == 1
        # A negative number means the fewest rounds: one broadcast carries both decisions of rank 0.
        number = int(self.broadcast_value(-calls if is_long or self._is_over else calls))
        rounds = FEWEST if number < 0 else _ROUNDS
        samples = [self._seconds_per_call(work, abs(number)) for _ in range(rounds)]
        return self.record_median(samples) / parts

    def issuing_seconds(self, work: Work) -> float:
        """Return the median seconds in which the host issues a call without waiting for the device.

        Each call begins with an empty queue, so that the queue never fills up.
        """
        self._seconds_per_call(work, FEWEST)
        return self.record_median([self._time_issue(work) for _ in range(_ISSUES)])

    def _time_issue(self, work: Work) -> float:
        """Return the seconds of one call after the queue has become empty."""
        self.synchronize_device()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    @property
    def is_shared(self) -> bool:
        """True if ranks share cores."""
        return self.turns > 1

    def host_seconds(self) -> float:
        """Return a clock of this thread's work, in seconds.

        It is the wall clock, which includes waits; if ranks share cores, it is CPU seconds times
        `turns`.
        """
        return self.turns * time.thread_time() if self.is_shared else time.perf_counter()

    def busy_seconds(self, work: Work, *, parts: int = 1) -> float:
        """Return the median seconds of one part of `work` that needs no other rank.

        If ranks share cores, each repeats the work until an end time that all have in common, so
        that caches are as full as while all compute.
        """
        if not self.is_shared:
            return self.seconds(work, parts=parts)
        began = time.perf_counter()
        work()
        window = self.broadcast_value(max(_SHARED_SECONDS, time.perf_counter() - began))
        self.synchronize_ranks()
        began = time.perf_counter()
        ends = [began + number * window for number in range(1, FEWEST + 1)]
        return self.record_median([self._seconds_per_call_until(end, work) for end in ends]) / parts

    def meeting_seconds(self, work: Work, *, parts: int = 1, between: Work | None = None) -> float:
        """Return the seconds of one part of a collective `work`.

        Each rank first runs `between`, as between the collectives of a step. On CPUs, a call
        returns at once, or one scheduler slice later if a sending thread finds no free core. The
        mean over many calls shows both; the median over several means excludes a mean that other
        processes disturbed.

        If ranks share cores, a waiting rank leaves its core to ranks that still compute. The result
        is then the time of computing and meeting minus the time of computing alone.

        Args:
            work: The collective, called by all ranks.
            parts: Number of equal parts of the work.
            between: The computation before each call, by default one or two milliseconds.
        """
        if self.device.type == "cuda":
            return self.seconds(work, parts=parts)
        if self.is_shared:
            return self.added_seconds(lambda: nullcontext(work), parts=parts, between=between)
        between = between or self._compute_between
        calls = self._num_meetings(work, between)
        means = [self._mean_after_computing(work, calls, between) for _ in range(_ROUNDS)]
        return self.record_median(means) / parts

    def added_seconds(
        self,
        works: Callable[[], AbstractContextManager[Work]],
        *,
        parts: int = 1,
        between: Work | None = None,
    ) -> float:
        """Return the seconds that one part of work adds to a rank that computes repeatedly.

        On a GPU, the host does not wait for computation, so the work is timed alone.

        Args:
            works: Opens the work of a round. A call of it may leave unfinished operations to later
                calls; closing it finishes them.
            parts: Number of equal parts of the work.
            between: The computation before each call.
        """
        if self.device.type == "cuda":
            with works() as work:
                return self.seconds(work, parts=parts)
        between = between or self._compute_between
        with works() as work:
            calls = self._num_meetings(work, between)
        more = []
        for _ in range(_ROUNDS):
            self.synchronize_ranks()
            own, began = 0.0, time.perf_counter()
            with works() as work:
                for _ in range(calls):
                    before = time.thread_time()
                    between()
                    own += time.thread_time() - before
                    work()
            more.append((time.perf_counter() - began - self.turns * own) / calls)
        return self.record_median(more) / parts

    def _compute_between(self) -> None:
        compute(self.device)

    def _mean_after_computing(self, work: Work, calls: int, between: Work) -> float:
        """Return the mean seconds of `work` over `calls` calls, each after `between`."""
        taken = 0.0
        for _ in range(calls):
            between()
            began = time.perf_counter()
            work()
            taken += time.perf_counter() - began
        return taken / calls

    def _num_meetings(self, work: Work, between: Work) -> int:
        """Return the number of calls of a round, equal on all ranks."""
        estimate = self._seconds_per_call(work, FEWEST) + self._seconds_per_call(between, FEWEST)
        most = FEWEST if self._is_over else round(_MOST_MEETINGS * self.patience)
        seconds = _MEETING_SECONDS * self.patience
        calls = min(max(round(seconds / (_ROUNDS * estimate)), FEWEST), most)
        # one rank's clock decides: all ranks must make equally many calls
        return int(self.broadcast_value(calls))

    def record_median(self, samples: list[float]) -> float:
        """Return the median of the rounds, and record their spread."""
        median = statistics.median(samples)
        # `quantiles` needs two samples at least; there are FEWEST or more.
        low, _, high = statistics.quantiles(samples, n=4)
        spread = (high - low) / median if median > 0 else 0.0
        self.spreads.setdefault(self.table, []).append(spread)
        return median

    def synchronize_ranks(self) -> None:
        """Wait until the device is idle and all ranks are here."""
        self.synchronize_device()
        if self.world.size > 1:
            dist.barrier()

    def synchronize_device(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def broadcast_value(self, value: float) -> float:
        """Return rank 0's value on all ranks."""
        if self.world.size == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(held, src=0)
        return float(held)

    def _seconds_per_call_until(self, end: float, work: Work) -> float:
        """Return the CPU seconds of a call times `turns`, repeated until `end`."""
        # The time of the process includes torch's other threads.
        busy, calls = time.process_time(), 0
        while not calls or time.perf_counter() < end:
            work()
            calls += 1
        return self.turns * (time.process_time() - busy) / calls

    def _seconds_per_call(self, work: Work, calls: int) -> float:
        """Return the mean seconds of `calls` calls that all ranks begin together."""
        self.synchronize_ranks()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self.synchronize_device()
        return (time.perf_counter() - began) / calls


Rows = Iterator[tuple[tuple[Any, ...], float]]  # key of a measurement, and its seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The measurement of one table of rates.

    Attributes:
        table: Name of the table.
        share: Its share of the time.
        points: Returns the points to measure, the cheapest first.
        least: The number of points that are measured in any case.
        rows: Sets up one point, times it and yields its rows.
    """

    table: str
    share: float
    points: Callable[[Bench, Points], Iterable[Any]] = lambda _, points: (points,)
    least: int = 1
    rows: Callable[[Bench, Any], Rows]

    def measure_rows(self, bench: Bench, points: Points) -> Rows:
        """Yield the rows of as many points as there is time for."""
        for point in bench.iter_in_time(self.points(bench, points), least=self.least):
            yield from self.rows(bench, point)
