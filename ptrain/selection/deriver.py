"""Derive the exact figures of a search's candidates, and compute shared results once.

Without measured rates of the machine, candidates are ordered by a nominal pace: operations over the
cluster's declared operations per second, bytes over its declared bandwidths. That is not a
prediction of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from math import inf

from ptrain.algebra.legality import is_sound
from ptrain.axes.candidates import NOTHING_FIXED, apply_choices
from ptrain.axes.data.candidates import SPACE as DATA_SPACE
from ptrain.cost import Collective
from ptrain.derivation.estimate import exact_alone
from ptrain.derivation.machine import Machine, machine_of
from ptrain.derivation.tape import PeakExceeded
from ptrain.derivation.tensor import fullest_place
from ptrain.derivation.work import model_work, why_unknown
from ptrain.errors import PtrainError, input_error
from ptrain.facts.model import ModelFacts, ModelWork, Operator
from ptrain.facts.traced_part import traced_part
from ptrain.plan.lower import built_in_facts, lower
from ptrain.rates.pace import Pace, UnknownRate, bus_factor
from ptrain.selection.fit import Fit
from ptrain.selection.job import ReadFacts, SearchedJob, read_or_kept, with_heads
from ptrain.selection.profile import clock_of, seconds_of
from ptrain.selection.ranking import Ranked, Scored, SearchGoal, ranked
from ptrain.selection.search import Search
from ptrain.selection.space import Candidate
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import GradientSync, UnitSize
from ptrain.spec.model import ModelShape, ModelSpec
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping
from ptrain.steps.step import Plan


@dataclass
class TracedCuts:
    """The traced parts of a model; a part is everything that a trace depends on.

    At most `most` parts are traced, since each takes seconds. `excess` is the number of bytes by
    which the last exact peak of a part exceeded its estimate: blocks differ from those of the
    stand-in, and all candidates of a part have equal blocks. `room`: bytes that a peak may fill.
    """

    read: ReadFacts
    most: int
    room: float = inf
    cuts: dict[object, tuple[int, Spec]] = field(default_factory=dict)
    facts: dict[int, ModelFacts] = field(default_factory=dict)
    refusals: dict[int, PtrainError] = field(default_factory=dict)  # of parts not derivable
    excess: dict[int, float] = field(default_factory=dict)

    def cut(self, spec: Spec) -> int:
        """Return the number of a spec's part."""
        part = traced_part(spec)  # cannot be hashed as a whole
        # The fields that candidates choose. The assertion below catches a field that is missing
        # here.
        key = part.factors, part.batch, part.unit, part.pipeline, part.context, part.activations
        cut, first = self.cuts.setdefault(key, (len(self.cuts), part))
        assert part == first, "all that a trace depends on and candidates choose is in the key"
        return cut

    def of(self, spec: Spec) -> ModelFacts:
        """Return the facts of a spec's part, traced once; raise PtrainError if it cannot be
        traced."""
        if (cut := self.cut(spec)) not in self.facts:
            self.facts[cut] = self.read(spec)
        return self.facts[cut]

    def may_fit(self, cut: int, peak: float) -> bool:
        """Return True if a candidate of a part with this estimated peak is worth deriving.

        By the known excess it fits (of other parts the smallest one is assumed), and its part is
        traced or may still be.
        """
        tried = self.facts.keys() | self.refusals.keys()
        least = min(self.excess.values(), default=0.0)
        may_be_traced = cut in self.facts or len(tried) < self.most
        is_open = may_be_traced and cut not in self.refusals
        return is_open and peak + self.excess.get(cut, least) <= self.room


class NominalPace:
    """The pace by a cluster's declared figures, for ordering only."""

    overlaps = False

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def operator_seconds(self, operator: Operator) -> float:
        """Return operations over the declared operations per second; 0 if none is declared."""
        flops = self.cluster.flops
        return operator.times * operator.flops / flops if flops else 0.0

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        """Return bus bytes over the declared bandwidth."""
        cluster = self.cluster
        bandwidth = cluster.inter_node_bandwidth if nodes > 1 else cluster.intra_node_bandwidth
        return payload * bus_factor(collective, ranks) / bandwidth

    def _unknown_seconds(self, *_: object, **__: object) -> float:
        """Return 0, because a cluster declares no rate for this."""
        return 0.0

    late_seconds = update_seconds = clip_seconds = hook_seconds = _unknown_seconds

    def copy_seconds(self, copy: Collective, size: int) -> float:
        return size / self.cluster.intra_node_bandwidth


BEST = 150  # candidates that are derived exactly
# Limits of one search. They trade completeness for minutes, and none changes a figure.
_ALIKE = 2  # candidates that differ only in placements and dials; for pipelines, in data axes
_TRIED = 3  # tried candidates per wanted one: estimates within SLACK of the limit may not fit
_MOST = 2**12  # candidates considered, best estimates first
_PLAIN = 1.0  # work of a step without a pipeline
_WORK, _LEAST = (
    0.5,
    8.0,
)  # pipelines' work in plain steps: per wanted candidate, and minimum in total
_PASSES, _HALVES = 300, 60  # pipeline passes, full or split, that take as long as a plain step
_PER_CUT = 3  # wanted candidates per traced part of a model
_OUTSIDE = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD)


MachineOf = Callable[[Spec, Plan, ModelFacts], Machine]


@dataclass
class Deriver:
    """One job's search, its machine, and the exact rows so far.

    Attributes:
        job: The job.
        objective: Figure that the search minimizes.
        machine: Returns the machine of a spec. Default: its cluster's.
        count: Number of candidates to predict exactly.
        read: Reads the facts of a model without tables. Its stand-in is scored, and the model
            itself is derived.
        facts: Facts by model and unit size.
        works: Work by everything that it depends on.
        rows: Exact rows; None for candidates that do not fit.
        watch: Called with the number of derived and of wanted candidates.
        derived: Number of derivations.
        on_host: Fits of candidates that fit a device but not the host.
    """

    job: SearchedJob
    objective: SearchGoal = SearchGoal.TIME
    machine: MachineOf = machine_of
    count: int = BEST
    read: ReadFacts = read_or_kept
    facts: dict[tuple[ModelSpec, UnitSize], ModelFacts] = field(default_factory=dict)
    works: dict[tuple[object, ...], ModelWork] = field(default_factory=dict)
    rows: dict[Candidate, Ranked | None] = field(default_factory=dict)  # None if it does not fit
    watch: Callable[[int, int], None] = lambda done, count: None
    derived: int = 0
    on_host: list[Fit] = field(
        default_factory=list
    )  # of candidates that fit a device but not the host

    # -- the machine

    @cached_property
    def _whole(self) -> tuple[Pace | None, str]:
        """The pace for all devices, or None and the reason why it is unknown."""
        base, devices = self.job.scored, self.job.devices
        spec = apply_choices(base, [next(iter(DATA_SPACE.choices(base, devices, NOTHING_FIXED)))])
        name, layout = base.optimizer.name, base.precision.effective_layout
        try:
            machine = self._machine(spec)
            pace = machine.pace
            pace.update_seconds(
                name, layout, elements=1, tensors=1
            )  # every candidate has an update
            seconds_of(base, machine.work(0), clock_of(base, pace))
            return pace, ""
        except UnknownRate as unknown:
            return None, str(unknown)

    @property
    def unknown(self) -> str:
        """The reason why step times are unknown; "" if they are known."""
        return self._whole[1]

    @cached_property
    def search(self) -> Search:
        """The search of the job's space."""
        pace, cluster = self._whole[0], self.job.base.cluster
        assert cluster is not None, "a job that is searched for has a cluster"
        return Search(
            self.job,
            self.work,
            pace or NominalPace(cluster),
            is_nominal=pace is None,
            by_memory=self.objective is SearchGoal.MEMORY,
        )

    def work(self, spec: Spec) -> ModelWork:
        """Return the computation of the first rank of a spec, as it is scored, per micro-batch.

        Raises:
            UnknownRate: The rate of an operator is unknown.
        """
        plan, facts = self._plan(spec), self._facts(spec)
        index = fullest_place(spec, plan)
        shape, like = self.job.base.model, self.job.stand_in
        if self.unknown:
            work = model_work(spec, plan, facts, index)
        else:
            work = self._work(spec, self.machine(spec, plan, facts), index)
        if work is None:
            raise UnknownRate(why_unknown(spec, plan, facts))
        if like is None or not isinstance(shape, ModelShape):
            return work
        return with_heads(work, shape, like)

    def _work(self, spec: Spec, machine: Machine, index: int) -> ModelWork:
        """Return the machine's work at an index, cached by everything that it depends on."""
        inner = tuple(f for f in spec.factors if f.axis not in _OUTSIDE)
        staged = spec.degree(Axis.PP) > 1
        # A job has at most one model without a shape.
        shape = spec.model if isinstance(spec.model, ModelShape) else None
        program = spec.compile, spec.precision.matmul
        key = (
            *(shape, inner, spec.context, spec.batch.micro, spec.activations, staged, index),
            program,
        )
        if key not in self.works:
            self.works[key] = machine.work(index)
        return self.works[key]

    def _machine(self, spec: Spec) -> Machine:
        return self.machine(spec, self._plan(spec), self._facts(spec))

    def _plan(self, spec: Spec) -> Plan:
        return lower(spec, self._facts(spec))

    def _facts(self, spec: Spec) -> ModelFacts:
        base = self.job.base
        # A compiled job is scored as the same model, eager.
        is_scored = (spec.compile, spec.precision) != (base.compile, base.precision)
        if self.cuts is not None and spec.model == base.model and not is_scored:
            return self.cuts.of(spec)
        key = spec.model, spec.unit_size
        if key not in self.facts:
            self.facts[key] = built_in_facts(spec)
        return self.facts[key]

    # -- exactly

    @cached_property
    def cuts(self) -> TracedCuts | None:
        """The traced parts of a model without tables; None for other models."""
        if self.job.stand_in is None:
            return None
        most = max(1, self.count // _PER_CUT)
        return TracedCuts(self.read, most=most, room=self.job.room)

    def exactly(self, scored: Scored, limit: float = inf) -> Ranked | None:
        """Return the exact row of a candidate.

        None if it is illegal, if its peak is unknown, or if its peak is above `limit` bytes.
        """
        spec = scored.candidate.spec(self.job.base)
        try:
            row = self._ranked(spec, scored, limit) if is_sound(spec) else None
        except PtrainError as error:
            if self.cuts is None:
                raise
            self.cuts.refusals[self.cuts.cut(spec)] = error  # another part may work
            return None
        if row is None or row.memory.peak_bytes is None:
            if row is not None and self.cuts is not None:
                why = input_error("model", f"the peak is unknown: {row.memory.why}")
                self.cuts.refusals[self.cuts.cut(spec)] = why
            return None
        if self.cuts is not None:
            self.cuts.excess[self.cuts.cut(spec)] = row.peak_bytes - scored.peak
        # with the resolved mapping of this spec, so that it can be written
        spec = replace(spec, name=self.job.name)
        return replace(row, spec=replace(spec, resolved=to_mapping(spec, sync_is_written=True)))

    def _ranked(self, spec: Spec, scored: Scored, limit: float) -> Ranked | None:
        """Return the row of a spec, derived once for all candidates with equal steps."""
        key = played_as(scored.candidate, spec)
        if key not in self.rows or (self.rows[key] is None and limit == inf):
            self.derived += 1
            self.rows[key], facts = None, self._facts(spec)
            with suppress(PeakExceeded):
                exact = exact_alone(spec, facts, self._timing(spec), limit)
                self.rows[key] = ranked(spec, scored, exact, facts)
        row = self.rows[key]
        return row and replace(row, spec=spec, closed=scored)

    def _timing(self, spec: Spec) -> Machine | None:
        """Return the machine with cached works; None if the time is unknown."""
        if self.unknown:
            return None
        try:
            machine = self._machine(spec)
        except UnknownRate:
            return None
        return machine._replace(work=lambda index: self._work(spec, machine, index))

    def _fitting(self, scored: Iterable[Scored], count: int) -> Iterator[Ranked]:
        """Yield the first `count` rows that fit.

        A candidate that fits only if its estimate is wrong is tried only while it would be faster
        than the rows that fit.
        """
        wanted, fastest, by_memory = count, inf, self.objective is SearchGoal.MEMORY
        tried = self._tried(scored, count, lambda: fastest == inf)
        # A traced peak calibrates the estimates of its part, so it is derived in full even if it
        # does not fit.
        room = self.job.room if self.cuts is None else inf
        for candidate in islice(tried, _TRIED * count):
            if not count:
                return
            self.watch(wanted - count, wanted)
            is_beaten = candidate.seconds > fastest and not by_memory
            if candidate.peak > room and is_beaten:
                continue
            if (row := self.exactly(candidate, room)) is None:
                continue
            if row.memory.fits_device and not row.memory.fits:
                self.on_host.append(row.memory)
            if self._obeys(row):
                count -= 1
                fastest = min(fastest, row.nominal_seconds)
                yield row

    def _tried(
        self, scored: Iterable[Scored], count: int, is_needed: Callable[[], bool]
    ) -> Iterator[Scored]:
        """Yield the candidates to derive.

        - For a traced model: candidates of a few parts.
        - Of candidates with equal steps: the first.
        - Of candidates that differ only in placements and dials: the first `_ALIKE` not known to be
          too large; the rest come last.
        - Pipelines with at most `_WORK` plain steps of work per wanted candidate; the rest come
          last, if needed.
        """
        if self.cuts is not None:
            yield from self._of_cuts(self.cuts, scored)
            return
        work, alike, played = max(_LEAST, _WORK * count), Counter[object](), set[Candidate]()
        later = list[Scored]()
        first = ((False, one) for one in islice(scored, _MOST))
        for is_last, one in chain(first, ((True, one) for one in later)):
            kind = _but_tuples(one.candidate)
            # Candidates that differ only in placements and dials have similar figures. Without the
            # limit, the variants of one placement would fill the list.
            if not is_last and alike[kind] >= _ALIKE:  # most are, and need no spec
                later.append(one)
                continue
            spec = one.candidate.spec(self.job.base)
            key, of_one = played_as(one.candidate, spec), work_of(spec)
            if not is_last and of_one > max(work, _PLAIN):
                later.append(one)
            elif key not in played and (not is_last or of_one <= _PLAIN or is_needed()):
                played.add(key)
                if is_sound(spec):
                    work -= of_one * (of_one > _PLAIN)
                    yield one
                    alike[kind] += key not in self.rows or self.rows[key] is not None

    def _of_cuts(self, cuts: TracedCuts, scored: Iterable[Scored]) -> Iterator[Scored]:
        """Yield candidates of traced parts, at most `count` per part.

        Candidates that seem not to fit are checked again at the end, when more is known.
        """
        tried, later = Counter[int](), list[Scored]()
        for is_last, one in chain(((False, one) for one in scored), ((True, one) for one in later)):
            # most are too large for any part, and need no spec
            if one.peak + min(cuts.excess.values(), default=0.0) > cuts.room:
                later.extend(() if is_last else (one,))
                continue
            spec = one.candidate.spec(self.job.base)
            cut = cuts.cut(spec)
            # Programs and fp8 products exclude choices that are legal as scored.
            if tried[cut] < self.count and cuts.may_fit(cut, one.peak) and is_sound(spec):
                tried[cut] += 1
                yield one

    def _obeys(self, row: Ranked) -> bool:
        """Return True if a row fits, leaves the margin free and satisfies constraints on
        figures."""
        figures = (("memory", float(row.peak_bytes)), ("time", row.seconds))
        return row.memory.leaves(self.job.margin_bytes) and all(
            figure is None or rule.holds_of(figure)
            for name, figure in figures
            for rule in self.job.where.bounds(name)
        )


def work_of(spec: Spec) -> float:
    """Return the work of deriving a spec, in units of a step without a pipeline."""
    if (ranks := spec.degree(Axis.PP)) == 1:
        return 1.0
    passes = spec.pipeline.stages_over(ranks) * spec.batch.accumulate
    return 1 + passes / (_HALVES if spec.pipeline.is_in_halves else _PASSES)


def _but_tuples(candidate: Candidate) -> object:
    """Return a candidate without placements and dials of the data axes.

    For a pipeline, which takes longest to derive, also without their degrees.
    """
    pipeline, degrees = candidate.pipeline, tuple[tuple[Axis, int], ...]()
    if not pipeline.factors:
        degrees = tuple((factor.axis, factor.degree) for factor in candidate.data.factors)
    return candidate.within, pipeline, degrees, candidate.micro, candidate.kept


def played_as(candidate: Candidate, spec: Spec) -> Candidate:
    """Return one representative of all candidates with equal steps.

    With a single micro-batch per step, `sync.gradients` has no effect.
    """
    if spec.batch.accumulate > 1:
        return candidate
    sync = replace(spec.sync, gradients=GradientSync.EVERY)
    others = [change for change in candidate.data.changes if change[0] != "sync"]
    return replace(candidate, data=replace(candidate.data, changes=(*others, ("sync", sync))))
