"""Derive the exact figures of a search's candidates, with what they share computed once.

Where no rates of the machine were measured, candidates are ordered by a nominal pace: operations
over the declared operations per second of the cluster, bytes over its declared bandwidths. That is
not a prediction of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import inf

from ptrain.algebra.legality import is_sound
from ptrain.axes.candidates import NOTHING, chosen
from ptrain.axes.data.candidates import SPACE as DATA_SPACE
from ptrain.cost import Collective
from ptrain.derivation.estimate import exact_alone
from ptrain.derivation.machine import Machine, machine_of
from ptrain.derivation.tape import TooLarge
from ptrain.derivation.tensor import fullest_place
from ptrain.derivation.work import model_work, why_unknown
from ptrain.errors import PtrainError, refused
from ptrain.facts.model import ModelFacts, ModelWork, Operator
from ptrain.facts.traced_part import traced_part
from ptrain.plan.lower import lower, own_facts
from ptrain.rates.pace import Pace, UnknownRate, bus_factor
from ptrain.selection.fit import Fit
from ptrain.selection.job import ReadFacts, SearchedJob, read_or_kept, with_heads
from ptrain.selection.profile import clock_of, seconds_of
from ptrain.selection.ranking import Ranked, Scored, SearchGoal, SearchTask, ranked
from ptrain.selection.search import Search
from ptrain.selection.space import Candidate
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import GradientSync, UnitSize
from ptrain.spec.model import ModelShape, ModelSpec
from ptrain.spec.placement import Axis
from ptrain.spec.precision import Layout
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping
from ptrain.steps.step import Plan


@dataclass
class TracedCuts:
    """The cuts of a model that were traced, `most` of them, for each takes seconds; a cut is what a
    trace depends on. `excess` is by how many bytes the last exact peak of a cut was above its
    estimate: blocks differ from those of the stand-in, and all candidates of a cut have the same
    blocks. `room`: the bytes that a peak may fill."""

    read: ReadFacts
    most: int
    room: float = inf
    cuts: dict[object, tuple[int, Spec]] = field(default_factory=dict)
    facts: dict[int, ModelFacts] = field(default_factory=dict)
    refusals: dict[int, PtrainError] = field(default_factory=dict)
    excess: dict[int, float] = field(default_factory=dict)

    def cut(self, spec: Spec) -> int:
        """Return the number of a spec's cut."""
        part = traced_part(spec)  # which cannot be hashed as a whole
        key = part.factors, part.batch, part.unit, part.pipeline, part.context, part.activations
        cut, first = self.cuts.setdefault(key, (len(self.cuts), part))
        assert part == first, "all that a trace depends on and candidates choose is in the key"
        return cut

    def of(self, spec: Spec) -> ModelFacts:
        """Return the facts of a spec's cut, which are read once. Raises PtrainError for what cannot
        be traced."""
        if (cut := self.cut(spec)) not in self.facts:
            self.facts[cut] = self.read(spec)
        return self.facts[cut]

    @property
    def least_excess(self) -> float:
        """Return how far estimates are below at least, of cuts that are not traced as of others."""
        return min(self.excess.values(), default=0.0)

    def may_be(self, peak: float) -> bool:
        """Return whether an estimated peak may fit, whatever the cut is."""
        return peak + self.least_excess <= self.room

    def may_fit(self, spec: Spec, peak: float) -> bool:
        """Return whether a candidate with this peak by its estimate is worth deriving: by what is
        known of cuts it fits, and its own is traced or may be."""
        cut = self.cut(spec)
        if cut in self.refusals:
            return False
        if cut not in self.facts and len(self.facts.keys() | self.refusals.keys()) >= self.most:
            return False
        return peak + self.excess.get(cut, self.least_excess) <= self.room

    def refuse(self, spec: Spec, error: PtrainError) -> None:
        """Remember why a cut cannot be derived."""
        self.refusals[self.cut(spec)] = error

    def close(self) -> None:
        """Trace no other cut."""
        self.most = 0


class NominalPace:
    """By what a cluster's file says of its devices and links."""

    overlaps = False

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def operator_seconds(self, operator: Operator) -> float:
        flops = self.cluster.flops
        return operator.times * operator.flops / flops if flops else 0.0

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        cluster = self.cluster
        bandwidth = cluster.inter_node_bandwidth if nodes > 1 else cluster.intra_node_bandwidth
        return payload * bus_factor(collective, ranks) / bandwidth

    def late_seconds(self, computed: float) -> float:
        return 0.0

    def copy_seconds(self, copy: Collective, size: int) -> float:
        return size / self.cluster.intra_node_bandwidth

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        return 0.0

    def clip_seconds(self, layout: Layout, *, elements: int, tensors: int) -> float:
        return 0.0

    def hook_seconds(self, hook: Hook) -> float:
        return 0.0


BEST = 150  # candidates that are derived exactly
_ALIKE = 2  # that differ in tuples and dials alone, of a pipeline in what its data axes say
_TRIED = 3  # candidates for each that is wanted
_MOST = 2**12  # candidates that are looked at, the best by their estimates
_PLAIN = 1.0  # the work of a step without a pipeline
_WORK, _LEAST = 0.5, 8.0  # plain steps of pipelines for each candidate that is wanted, and in all
_PASSES, _HALVES = 300, 60  # of a pipeline, whole or split, that take as long as a plain step
_PER_CUT = 3  # candidates that are wanted, for each cut of a model that is traced
_OUTSIDE = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD)


def _unwatched(done: int, count: int) -> None:
    """Show no progress."""


MachineOf = Callable[[Spec, Plan, ModelFacts], Machine]


@dataclass
class Deriver:
    """One job's search, its machine and what it has derived. `machine` tells that of a spec, which
    is its cluster's unless somebody says another, `read` the facts of a model that no table tells
    of; this one is scored by its stand-in, and derived itself."""

    job: SearchedJob
    objective: SearchGoal = SearchGoal.TIME
    machine: MachineOf = machine_of
    count: int = BEST
    read: ReadFacts = read_or_kept
    facts: dict[tuple[ModelSpec, UnitSize], ModelFacts] = field(default_factory=dict)
    works: dict[tuple[object, ...], ModelWork] = field(default_factory=dict)
    rows: dict[Candidate, Ranked | None] = field(default_factory=dict)  # None: does not fit
    watch: Callable[[int, int], None] = _unwatched
    derived: int = 0
    on_host: list[Fit] = field(default_factory=list)  # of those that fit a device and no host

    # -- the machine

    @cached_property
    def _whole(self) -> tuple[Pace | None, str]:
        """The pace of as many ranks as there are devices, or why there is none."""
        base, devices = self.job.scored, self.job.devices
        spec = chosen(base, [next(iter(DATA_SPACE.choices(base, devices, NOTHING)))])
        name, layout = base.optimizer.name, base.precision.effective
        try:
            machine = self._machine(spec)
            pace = machine.pace
            pace.update_seconds(name, layout, elements=1, tensors=1)  # which all of them make
            seconds_of(base, machine.work(0), clock_of(base, pace), 0.0)
            return pace, ""
        except UnknownRate as unknown:
            return None, str(unknown)

    @property
    def unknown(self) -> str:
        """Why the time of a step is unknown; "" where it is not."""
        return self._whole[1]

    @cached_property
    def search(self) -> Search:
        """Return what goes through the space."""
        base, shape, (pace, _) = self.job.scored, self.job.base.model, self._whole
        assert base.cluster is not None, "a job that is searched for has a cluster"
        return Search(
            SearchTask(
                base=base,
                devices=self.job.devices,
                pace=pace or NominalPace(base.cluster),
                work=self.work,
                is_nominal=pace is None,
                objective=self.objective,
                where=self.job.where,
                written=self.job.written,
                own=shape if isinstance(shape, ModelShape) and shape.experts is not None else None,
                room=self.job.room,
            )
        )

    def work(self, spec: Spec) -> ModelWork:
        """Return what the first rank of a spec, as it is scored, computes of a micro-batch. Raises
        UnknownRate."""
        plan, facts = self._plan(spec), self._facts(spec)
        index = fullest_place(spec, plan)
        shape, like = self.job.base.model, self.job.stand_in
        work = model_work(spec, plan, facts, index) if self.unknown else None
        if not self.unknown:
            work = self._work(spec, self.machine(spec, plan, facts), index)
        if work is None:
            raise UnknownRate(why_unknown(spec, plan, facts))
        if like is None or not isinstance(shape, ModelShape):
            return work
        return with_heads(work, shape, like)

    def _work(self, spec: Spec, machine: Machine, index: int) -> ModelWork:
        inner = tuple(f for f in spec.factors if f.axis not in _OUTSIDE)
        staged = spec.degree(Axis.PP) > 1
        shape = spec.model if isinstance(spec.model, ModelShape) else None  # there is one other
        key = (shape, inner, spec.context, spec.batch.micro, spec.activations, staged, index)
        if key not in self.works:
            self.works[key] = machine.work(index)
        return self.works[key]

    def _machine(self, spec: Spec) -> Machine:
        return self.machine(spec, self._plan(spec), self._facts(spec))

    def _plan(self, spec: Spec) -> Plan:
        return lower(spec, self._facts(spec))

    def _facts(self, spec: Spec) -> ModelFacts:
        if self.cuts is not None and spec.model == self.job.base.model:
            return self.cuts.of(spec)
        key = spec.model, spec.unit_size
        if key not in self.facts:
            self.facts[key] = own_facts(spec)
        return self.facts[key]

    # -- exactly

    @cached_property
    def cuts(self) -> TracedCuts | None:
        """What is traced of a model that no table tells of; None of another."""
        if self.job.stand_in is None:
            return None
        most = max(1, self.count // _PER_CUT)
        return TracedCuts(self.read, most=most, room=self.job.room)

    def exactly(self, scored: Scored, limit: float = inf) -> Ranked | None:
        """Return the exact figures of a candidate; None where it is not legal after all, where its
        peak is not known, and of one that is above a limit."""
        spec = scored.candidate.spec(self.job.base)
        try:
            row = self._ranked(spec, scored, limit) if is_sound(spec) else None
        except PtrainError as error:
            if self.cuts is None:
                raise
            self.cuts.refuse(spec, error)  # another cut may do
            return None
        if row is None or row.memory.peak_bytes is None:
            if row is not None and self.cuts is not None:
                self.cuts.refuse(spec, refused("model", f"the peak is unknown: {row.memory.why}"))
            return None
        if self.cuts is not None:
            self.cuts.excess[self.cuts.cut(spec)] = row.peak_bytes - scored.peak
        # with a spec that can be written: its resolved mapping is its own
        spec = replace(spec, name=self.job.name)
        return replace(row, spec=replace(spec, resolved=to_mapping(spec, sync_is_written=True)))

    def _ranked(self, spec: Spec, scored: Scored, limit: float) -> Ranked | None:
        """The figures of a spec, which are derived once for candidates that do the same."""
        key = played_as(scored.candidate, spec)
        if key not in self.rows or (self.rows[key] is None and limit == inf):
            self.derived += 1
            self.rows[key], facts = None, self._facts(spec)
            with suppress(TooLarge):
                exact = exact_alone(spec, facts, self._timing(spec), limit)
                self.rows[key] = ranked(spec, scored, exact, facts)
        row = self.rows[key]
        return row and replace(row, spec=spec, closed=scored)

    def _timing(self, spec: Spec) -> Machine | None:
        """With works that are asked for once; None where time is unknown."""
        if self.unknown:
            return None
        try:
            machine = self._machine(spec)
        except UnknownRate:
            return None
        return machine._replace(work=lambda index: self._work(spec, machine, index))

    def _fitting(self, scored: Iterable[Scored], count: int) -> Iterator[Ranked]:
        """The first so many that fit, of those that are tried: what fits only if its estimate is
        wrong is tried as long as it would be faster than what fits."""
        wanted, fastest, by_memory = count, inf, self.objective is SearchGoal.MEMORY
        tried = self._tried(scored, count, lambda: fastest == inf)
        room = self.search.task.room if self.cuts is None else inf
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
        """Those of a few cuts of a model that is traced; of another those that are legal. Of those
        that do the same in a step that is the first, and of those that differ in tuples and dials
        alone the first `_ALIKE` that are not known to be too large: others come last. Pipelines
        take no more work than `_WORK` plain steps for each candidate that is wanted: others come
        last, if they are needed."""
        if self.cuts is not None:
            yield from self._of_cuts(self.cuts, scored)
            return
        work, alike, played = max(_LEAST, _WORK * count), Counter[object](), set[Candidate]()
        later = list[tuple[Scored, Spec]]()
        for one in islice(scored, _MOST):
            candidate, spec = one.candidate, one.candidate.spec(self.job.base)
            if (key := played_as(candidate, spec)) in played:
                continue
            played.add(key)
            kind, of_one = _but_tuples(candidate), work_of(spec)
            if alike[kind] >= _ALIKE or of_one > max(work, _PLAIN):
                later.append((one, spec))
            elif is_sound(spec):
                work -= of_one * (of_one > _PLAIN)
                yield one
                alike[kind] += key not in self.rows or self.rows[key] is not None
        for one, spec in later:
            if (work_of(spec) <= _PLAIN or is_needed()) and is_sound(spec):
                yield one

    def _of_cuts(self, cuts: TracedCuts, scored: Iterable[Scored]) -> Iterator[Scored]:
        """Those of cuts that are traced, no more of each than are wanted. What may not fit by the
        cuts that were traced before it is asked again at the end, when more of them are known."""
        tried, later = Counter[int](), list[Scored]()
        for is_last, candidates in ((False, scored), (True, later)):
            for candidate in candidates:
                if not cuts.may_be(candidate.peak):
                    if not is_last:
                        later.append(candidate)
                    continue
                spec = candidate.candidate.spec(self.job.base)
                cut = cuts.cut(spec)
                if tried[cut] < self.count and cuts.may_fit(spec, candidate.peak):
                    tried[cut] += 1
                    yield candidate

    def _obeys(self, row: Ranked) -> bool:
        """Whether a row fits, leaves the margin free and satisfies constraints on figures."""
        figures = (("memory", float(row.peak_bytes)), ("time", row.seconds))
        return row.memory.leaves(self.job.margin_bytes) and all(
            figure is None or rule.holds_of(figure)
            for name, figure in figures
            for rule in self.job.where.bounds(name)
        )


def work_of(spec: Spec) -> float:
    """Return the work of deriving a spec, where that of a step without a pipeline is 1."""
    if (ranks := spec.degree(Axis.PP)) == 1:
        return 1.0
    passes = spec.pipeline.stages_over(ranks) * spec.batch.accumulate
    return 1 + passes / (_HALVES if spec.pipeline.is_in_halves else _PASSES)


def _but_tuples(candidate: Candidate) -> object:
    """What a candidate says but for the tuples and the dials of the data axes; of a pipeline, whose
    derivation takes longest, without the degrees of these axes either."""
    pipeline, degrees = candidate.pipeline, tuple[tuple[Axis, int], ...]()
    if not pipeline.factors:
        degrees = tuple((factor.axis, factor.degree) for factor in candidate.data.factors)
    said = pipeline.factors, str(pipeline.changes)
    return candidate.within, said, degrees, candidate.micro, str(candidate.kept)


def played_as(candidate: Candidate, spec: Spec) -> Candidate:
    """Return one candidate for all that do the same in a step: its only micro-batch is its last,
    and is reduced whatever is said of those before it."""
    if spec.batch.accumulate > 1:
        return candidate
    sync = replace(spec.sync, gradients=GradientSync.EVERY)
    others = [change for change in candidate.data.changes if change[0] != "sync"]
    return replace(candidate, data=replace(candidate.data, changes=(*others, ("sync", sync))))
