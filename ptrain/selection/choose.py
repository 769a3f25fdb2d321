"""`select`: which placement of a job, by the search's closed forms and, of the best, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from ptrain.algebra.legality import check, executed
from ptrain.axes.candidates import chosen
from ptrain.axes.pipeline.stage_facts import stages_of
from ptrain.derivation.estimate import derive, own_facts
from ptrain.derivation.machine import Machine, machine_of
from ptrain.derivation.work import model_work, why_unknown
from ptrain.errors import refused
from ptrain.facts.model import ModelFacts
from ptrain.facts.operators import ModelWork
from ptrain.plan.lower import lower
from ptrain.rates.pace import Pace, UnknownRate
from ptrain.selection.algorithm1 import algorithm1, requirements
from ptrain.selection.demand import Demand, cheapest, demand_of, numbers
from ptrain.selection.figures import Ranked, on_more, ranked
from ptrain.selection.job import SearchedJob, searched_job
from ptrain.selection.known import KNOWN, reason
from ptrain.selection.nominal import NominalPace
from ptrain.selection.ranking import Lost, PlacementRanking, Remedy, front_of, order_of
from ptrain.selection.recipe import reasons
from ptrain.selection.search import Search
from ptrain.selection.space import alone
from ptrain.selection.task import Scored, SearchGoal, SearchResult, SearchTask
from ptrain.selection.where import Where, parse
from ptrain.spec.axis import Axis
from ptrain.spec.dials import UnitSize
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping
from ptrain.steps.step import Plan

_BEST = 100  # candidates that are derived exactly
_TRIED = 2  # times as many, at most, where some of them do not fit
_MOST_DEVICES = 2**13  # on which something is looked for that fits


def select(
    source: str,
    overrides: Sequence[str] = (),
    *,
    cluster: str | None = None,
    devices: int | None = None,
    objective: str = "time",
    where: Sequence[str] = (),
    count: int = _BEST,
    tokens: str | None = None,
    deadline: str | None = None,
    budget: float | None = None,
) -> PlacementRanking:
    """Return the ranking of all legal placements of a model, or of a spec with `auto` in it, on so
    many devices of a cluster; `count` of them are derived exactly. With the objective `devices` on
    the fewest on which `tokens` are trained within a `deadline` (30d) or a `budget`, with `cost` on
    as many as take least for a token. Raises SpecError for a job that cannot be searched."""
    job = searched_job(source, overrides, cluster=cluster, devices=devices, where=where)
    chooser = Chooser(job, SearchGoal(objective), count=count)
    return answer(chooser, demand_of(tokens, deadline, budget))


def answer(chooser: Chooser, demand: Demand | None) -> PlacementRanking:
    """Return the ranking on the chooser's devices, or on as many as its objective asks for. Raises
    SpecError where no number of devices does."""
    goal, most = chooser.objective, chooser.job.devices
    if goal is SearchGoal.COST:
        best = cheapest(_by_number(chooser))
        if best is None:
            raise refused("--objective", f"cost: {_no_time(chooser)}", "write --objective memory")
        return chooser.on(best[0]).choose()
    if goal is not SearchGoal.DEVICES:
        return chooser.choose()
    if demand is None:
        finding = "devices: the fewest for what, nobody says"
        raise refused("--objective", finding, "write --tokens 1T --deadline 30d")
    last = "nothing fits"
    for number, row in _by_number(chooser):
        if demand.is_met(row):
            return chooser.on(number).choose()
        last = f"{number} devices take {demand.described(row)}"
    finding = f"no number of devices up to {most} meets it: {last}"
    raise refused("--objective", finding, "write a later deadline or a larger budget")


def _by_number(chooser: Chooser) -> Iterator[tuple[int, Ranked]]:
    """The best on each number of devices on which something fits."""
    for number in numbers(chooser.job.devices):
        row = chooser.on(number).first()
        if row is not None:
            yield number, row


def _no_time(chooser: Chooser) -> str:
    return chooser.unknown or "nothing fits"


MachineOf = Callable[[Spec, Plan, ModelFacts], Machine]


@dataclass
class Chooser:
    """One job's search, its machine and what it has derived. `machine` tells that of a spec, which
    is its cluster's unless somebody says another."""

    job: SearchedJob
    objective: SearchGoal = SearchGoal.TIME
    machine: MachineOf = machine_of
    count: int = _BEST
    facts: dict[UnitSize, ModelFacts] = field(default_factory=dict)
    works: dict[tuple[object, ...], ModelWork] = field(default_factory=dict)
    derived: int = 0

    def on(self, devices: int) -> Chooser:
        """Return the same on another number of devices, by time."""
        job = replace(self.job, base=on_more(self.job.base, devices), devices=devices)
        by_time = self.objective not in (SearchGoal.TIME, SearchGoal.MEMORY)
        goal = SearchGoal.TIME if by_time else self.objective
        return Chooser(job, goal, machine=self.machine, count=self.count)

    def first(self) -> Ranked | None:
        """Return the best that fits by closed form, exactly."""
        return next(self._fitting(self.search.run(self.job.where).best, 1), None)

    # -- the machine

    @cached_property
    def _whole(self) -> tuple[Pace | None, str]:
        """The pace of as many ranks as there are devices, or why there is none."""
        base, devices = self.job.base, self.job.devices
        spec = chosen(base, next(iter(alone(base, devices))))
        try:
            return self._machine(spec).pace, ""
        except UnknownRate as unknown:
            return None, str(unknown)

    @property
    def unknown(self) -> str:
        """Why the time of a step is unknown; "" where it is not."""
        return self._whole[1]

    @cached_property
    def search(self) -> Search:
        """Return what goes through the space."""
        base, (pace, _) = self.job.base, self._whole
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
            )
        )

    def work(self, spec: Spec) -> ModelWork:
        """Return what the first rank of a spec computes of a micro-batch. Raises UnknownRate."""
        if self.unknown:
            plan, facts = self._plan(spec), self._facts(spec)
            work = model_work(spec, plan, facts)
            if work is None:
                raise UnknownRate(why_unknown(spec, plan, facts))
            return work
        return self._work(spec, self._machine(spec), 0)

    def _work(self, spec: Spec, machine: Machine, index: int) -> ModelWork:
        inner = tuple(f for f in spec.factors if f.axis not in _OUTSIDE)
        staged = spec.degree(Axis.PP) > 1
        key = (inner, spec.batch.micro, spec.activations, staged, index)
        if key not in self.works:
            self.works[key] = machine.work(index)
        return self.works[key]

    def _machine(self, spec: Spec) -> Machine:
        return self.machine(spec, self._plan(spec), self._facts(spec))

    def _plan(self, spec: Spec) -> Plan:
        facts = self._facts(spec)
        stages = stages_of(spec, facts)
        return lower(spec, facts.unit_modules, facts.roles, stages, facts.blocks, facts.fusions)

    def _facts(self, spec: Spec) -> ModelFacts:
        if spec.unit not in self.facts:
            self.facts[spec.unit] = own_facts(spec)
        return self.facts[spec.unit]

    # -- exactly

    def exactly(self, scored: Scored, base: Spec | None = None) -> Ranked | None:
        """Return the exact figures of a candidate; None where it is not legal after all, or where
        its peak is not known."""
        spec = scored.candidate.spec(base or self.job.base)
        if check(spec) or executed(spec):
            return None
        row = ranked(spec, scored, derive(spec, self._facts(spec), self._timing(spec)))
        return None if row.memory.peak_bytes is None else self._named(row)

    def _timing(self, spec: Spec) -> Machine | None:
        """With works that are probe for once; None where time is unknown."""
        if self.unknown:
            return None
        try:
            machine = self._machine(spec)
        except UnknownRate:
            return None
        return replace(machine, work=lambda index: self._work(spec, machine, index))

    def _fitting(self, scored: Iterable[Scored], count: int) -> Iterator[Ranked]:
        """The first so many that fit, of twice as many that are tried."""
        for candidate in islice(scored, _TRIED * self.count):
            if not count:
                return
            row = self.exactly(candidate)
            self.derived += row is not None
            if row is not None and row.memory.fits and self._obeys(row):
                count -= 1
                yield row

    def _obeys(self, row: Ranked) -> bool:
        where = self.job.where
        if not all(rule.holds_of(float(row.peak_bytes)) for rule in where.bounds("memory")):
            return False
        return row.seconds is None or all(
            rule.holds_of(row.seconds) for rule in where.bounds("time")
        )

    # -- the answer

    def choose(self) -> PlacementRanking:
        """Return the ranking, and what its figures say of the rest."""
        result = self.search.run(self.job.where)
        if not result.counts.scored and self.search.num_too_large:
            raise refused(
                "batch.sequence",
                "a sample alone takes more than a device has, whatever its states are",
                "write a smaller batch.sequence, loss=chunked, or more of tp",
            )
        if not result.counts.scored:
            raise refused("--devices", *self._no_candidate())
        rows = list(self._fitting(result.best, self.count))
        rows.sort(key=lambda row: order_of(self.objective, row))
        derived = self.derived
        on_front = list(self._fitting(result.front, len(result.front))) if rows else []
        selection = PlacementRanking(
            job=self.job,
            objective=self.objective,
            ranking=tuple(rows),
            front=front_of(
                row for row in (*rows, *on_front) if self.unknown or row.seconds is not None
            ),
            counts=result.counts,
            derived=derived,
            unknown=self.unknown,
        )
        if not rows:
            return self._without_fit(selection, result)
        best = rows[0].spec
        derivation = derive(best, self._facts(best), self._timing(best))
        return replace(
            selection, lost=tuple(self._lost(rows[0])), reasons=tuple(reasons(derivation))
        )

    def _named(self, row: Ranked) -> Ranked:
        """With a spec that can be written: its resolved mapping is its own."""
        spec = replace(row.spec, name=self.job.name)
        return replace(row, spec=replace(spec, resolved=to_mapping(spec, sync_is_written=True)))

    def _no_candidate(self) -> tuple[str, str]:
        job, base = self.job, self.job.base
        texts = " ".join(rule.text for rule in job.where.constraints)
        samples = base.batch.global_samples
        result = self.search.run(Where()) if job.where.constraints else None
        if result is not None and result.counts.scored:
            return (
                f"no legal placement on {job.devices} devices obeys {texts}",
                "leave one of them out",
            )
        near = [n for n in range(job.devices - 1, 0, -1) if samples % n == 0][:1]
        return (
            f"no product of {job.devices} devices is legal: pp takes at most a layer each, tp "
            f"divides the heads, and {samples} samples (batch.global) do not divide by what is "
            "left to the data axes",
            f"write --devices {near[0]}, or batch.global={samples // job.devices * job.devices}"
            if near and samples >= job.devices
            else f"write batch.global={job.devices} or more",
        )

    # -- what lost, and what would fit

    def _by_algorithm1(self, best: Ranked) -> Lost:
        """What the paper's selection says, and how it does here."""
        base, devices = self.job.base, self.job.devices
        assert base.cluster is not None, "a job that is searched for has a cluster"
        advised = algorithm1(requirements(self._facts(base), base.cluster, devices))
        name = f"the paper's Algorithm 1: {advised.advice}"
        if not advised.degrees:
            return Lost(name=name, best=None, why="the search has one")
        where = [f"mesh.{axis}={degree}" for axis, degree, _ in advised.degrees]
        where += [f"placement.{axis}={modes}" for axis, _, modes in advised.degrees]
        return self._like(name, where, best)

    def _like(self, name: str, where: Iterable[str], best: Ranked) -> Lost:
        """The best that obeys constraints besides the job's own."""
        result = self.search.run(Where((*self.job.where.constraints, *map(parse, where))))
        if not result.counts.scored:
            return Lost(name=name, best=None, why="none is legal with this batch")
        row = next(self._fitting(result.best, 1), None) or self._least(result)
        return Lost(name=name, best=row, why=reason(row, best, self.objective))

    def _lost(self, best: Ranked) -> Iterator[Lost]:
        for known in KNOWN:
            where = known.where(self.job.devices)
            if where is None:
                continue
            yield self._like(known.name, where, best)
        yield self._by_algorithm1(best)

    def _least(self, result: SearchResult, base: Spec | None = None) -> Ranked | None:
        """The exact figures of what needs least by closed form."""
        least = result.counts.least
        if least is None:
            return None
        peak, candidate = least
        return self.exactly(Scored(candidate=candidate, peak=peak, seconds=0.0), base)

    def _without_fit(self, selection: PlacementRanking, result: SearchResult) -> PlacementRanking:
        return replace(selection, least=self._least(result), remedies=tuple(self._remedies()))

    def _remedies(self) -> Iterator[Remedy]:
        """Each constraint left out; then the fewest devices, twice as many each time."""
        constraints = self.job.where.constraints
        for rule in constraints:
            others = Where(tuple(other for other in constraints if other is not rule))
            row = next(self._fitting(self.search.run(others).best, 1), None)
            if row is not None:
                yield Remedy(change=f"without {rule.text}", fitting=row)
        devices = 2 * self.job.devices
        while devices <= _MOST_DEVICES:
            row = self.on(devices).first()
            if row is not None:
                yield Remedy(change=f"--devices {devices}", fitting=row)
                return
            devices *= 2


_OUTSIDE = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD)
