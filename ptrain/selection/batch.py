"""Blocks of candidates that are scored together: of most few candidates fit, and arrays of few
numbers take longer to begin with than to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ptrain.cost import Collective
from ptrain.selection.arrays import Array, Columns, numpy
from ptrain.selection.flows import BoundedPeaks, CandidateBlock, FlowGroup, InnerCut, PipelineFlows
from ptrain.selection.peaks import TOGETHER, together
from ptrain.selection.profile import IssueSeconds, Seconds, Wires
from ptrain.selection.rows import OF_ISSUE, OF_TIME
from ptrain.selection.score import Places, busy, issued
from ptrain.selection.task import SLACK, SearchTask
from ptrain.spec.activations import Kept
from ptrain.spec.rates import Hook


@dataclass(frozen=True, kw_only=True)
class OpenBlock:
    """A block of candidates that are not scored yet. `seconds` gives those of one of its
    micro-batches, or None where nobody knows them."""

    group: FlowGroup
    micro: int
    kept: Kept
    peaks: BoundedPeaks
    seconds: Callable[[], Seconds | None]


_NONE: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class FittingRows:
    """Those of a block's candidates that may fit, with a micro-batch's seconds, where these are
    known."""

    block: OpenBlock
    peaks: Array | None
    rows: Sequence[int] | Array
    columns: Sequence[int] | Array
    work: Seconds | None


@dataclass
class BlockBatch:
    """Blocks of one cut, in the order in which they are searched."""

    task: SearchTask
    flows: PipelineFlows
    wires: Wires
    inner: InnerCut
    blocks: list[OpenBlock] = field(default_factory=list)
    moments: int = 0

    def add(self, block: OpenBlock) -> None:
        """Score a block with the others."""
        self.blocks.append(block)
        self.moments += block.peaks.moments

    @property
    def is_full(self) -> bool:
        """Return whether its arrays are large enough."""
        return self.moments >= TOGETHER

    def scored(self) -> Iterator[CandidateBlock]:
        """Yield the blocks with the figures of their candidates, and forget them."""
        blocks, self.blocks, self.moments = self.blocks, [], 0
        unknown = [block.peaks for block in blocks if block.peaks.is_open]
        while unknown:
            for bounded, peaks in zip(
                unknown, together([bounded.pairs() for bounded in unknown]), strict=True
            ):
                bounded.learn(peaks)
            unknown = [bounded for bounded in unknown if bounded.is_open]
        fitting = [self._fitting(block) for block in blocks]
        timed = iter(self._timed([rows for rows in fitting if rows.work is not None]))
        for rows in fitting:
            endless = numpy().full(len(rows.rows), float("inf"))
            yield self._closed(rows, endless if rows.work is None else next(timed))

    def _fitting(self, block: OpenBlock) -> FittingRows:
        np, peaks = numpy(), block.peaks.peaks
        if peaks is None:
            return FittingRows(block=block, peaks=None, rows=_NONE, columns=_NONE, work=None)
        rows, columns = np.nonzero(peaks <= self.task.room * SLACK)
        work = block.seconds() if len(rows) else None
        return FittingRows(block=block, peaks=peaks, rows=rows, columns=columns, work=work)

    def _closed(self, fitting: FittingRows, seconds: Array) -> CandidateBlock:
        block, peaks, rows, columns = fitting.block, fitting.peaks, fitting.rows, fitting.columns
        least = None
        if peaks is not None:
            at = int(peaks.argmin())
            least = float(peaks.flat[at]), *divmod(at, peaks.shape[1])
        return CandidateBlock(
            within=self.inner.within,
            flows=block.group.flows,
            table=block.peaks.table,
            micro=block.micro,
            kept=block.kept,
            number=block.peaks.number,
            untimed=len(rows) if fitting.work is None else 0,
            rows=rows,
            columns=columns,
            peaks=seconds if peaks is None else peaks[rows, columns],
            seconds=seconds,
            least=least,
        )

    def _timed(self, fitting: list[FittingRows]) -> Iterator[Array]:
        """The seconds of a step of each candidate that may fit."""
        if not fitting:
            return
        np = numpy()
        lengths = [len(of.rows) for of in fitting]
        number = np.repeat([of.block.group.micro_batches for of in fitting], lengths)[:, None]
        seconds = _repeated([of.work for of in fitting if of.work is not None], lengths)
        rows = self._columns(fitting)
        of_flows = [of.block.group.places.take(of.columns, axis=1) for of in fitting]
        places = Places(*np.concatenate(of_flows, axis=1))
        idle = np.concatenate([self._idle(of)[of.columns] for of in fitting])
        taken = busy(rows, places, self.inner.sizes, seconds, number)
        # the rank that computes most is the one that the others wait for
        forward, backward = places.computing(seconds)
        computing = number * (forward + backward)
        slowest = computing.argmax(axis=1)
        longer = taken.longer[np.arange(len(slowest)), slowest]
        alone = np.concatenate([of.block.group.computes_alone[of.columns] for of in fitting])
        whole = number[:, 0] * self.flows.computing(seconds)[:, 0]
        longer = np.where(alone, taken.of_others(computing, whole, slowest), longer)
        steps = (taken.passes + taken.update).max(axis=1) + idle * longer
        if self.wires.is_issued:
            steps = np.maximum(steps, self._issued(fitting, rows, places, number))
        yield from (steps[start:end] for start, end in pairwise([0, *np.cumsum(lengths)]))

    def _columns(self, fitting: list[FittingRows]) -> Columns:
        """The columns of time of candidates, one below the other."""
        np = numpy()
        tables = [
            (of.block.peaks.table.issues if self.wires.is_issued else of.block.peaks.table.times)
            for of in fitting
        ]
        of_rows = [table.take(of.rows, axis=1) for table, of in zip(tables, fitting, strict=True)]
        names = (*OF_TIME, *OF_ISSUE) if self.wires.is_issued else OF_TIME
        return dict(zip(names, np.concatenate(of_rows, axis=1)[:, :, None], strict=True))

    def _issued(
        self, fitting: list[FittingRows], rows: Columns, places: Places, number: Array
    ) -> Array:
        """The seconds of the host that issues for longest, by candidate."""
        np, lengths = numpy(), [len(of.rows) for of in fitting]
        issuing_of = [of.work.issuing for of in fitting if of.work and of.work.issuing]
        both = [[(*of.front, *of.block, *of.behind) for of in parts] for parts in issuing_of]
        whole, parted = np.repeat(both, lengths, axis=0).transpose(1, 2, 0)[..., None]
        in_halves = np.concatenate([of.block.group.in_halves[of.columns] for of in fitting])[
            :, None
        ]
        front, back, block, of_block, behind, of_behind = np.where(in_halves, parted, whole)
        issuing = IssueSeconds(
            front=(front, back), block=(block, of_block), behind=(behind, of_behind)
        )
        of_units = issued(rows, places, self.inner.sizes, issuing, number)
        passes = places.boundaries * number * (2 + in_halves)
        of_stages = passes * self.task.pace.hook_seconds(Hook.PIPELINE_PASS)
        return (of_units + of_stages).max(axis=1)

    def _idle(self, fitting: FittingRows) -> Array:
        """What each flow's schedule leaves idle, and what it waits for at its boundaries: while it
        fills and drains, and where nothing moves beside what is computed, for each micro-batch."""
        np, work, group = numpy(), fitting.work, fitting.block.group
        assert work is not None, "what is timed"
        forward, backward = Places(*group.places).computing(work)
        slowest = (forward + backward).argmax(axis=1)
        number, hidden = group.micro_batches, fitting.block.peaks.ranks.act.hidden
        waits = []
        for at, flow in enumerate(group.flows):
            if flow.schedule is None:
                waits.append(0.0)
                continue
            longest = float(forward[at, slowest[at]]), float(backward[at, slowest[at]])
            stride = self.task.devices // flow.ranks
            crossing = self.wires.seconds(Collective.SEND, 2, stride, hidden)
            crossings = 2 * flow.crossings(number, overlaps=self.task.pace.overlaps)
            waits.append(self.flows.idle(flow, number, work, longest) + crossings * crossing)
        return np.array(waits)


def _repeated(seconds: list[Seconds], lengths: list[int]) -> Seconds:
    """The seconds of blocks, each as often as it has candidates, one below the other."""
    rows = [(*of.front, *of.block, *of.behind, of.weights, *of.moved) for of in seconds]
    columns: Any = numpy().repeat(numpy().array(rows), lengths, axis=0).T[:, :, None]
    (front, back), (block, of_block), (behind, of_behind) = columns[0:2], columns[2:4], columns[4:6]
    return Seconds(
        front=(front, back),
        block=(block, of_block),
        behind=(behind, of_behind),
        weights=columns[6],
        moved=(columns[7], columns[8]),
    )
