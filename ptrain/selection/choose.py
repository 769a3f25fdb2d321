"""`select`: find the best placement of a job, by the search's estimates, then exactly for the best
candidates.

From the best candidates a descent changes one dial at a time, predicted exactly, as long as the
result improves. The list of dials is fixed: when gradients are reduced and all-gathered units
freed, the size of a unit, overlap and prefetch, the size of a bucket, the way to keep activations,
the micro-batch, and the schedule with its stages. If there is no candidate, the constraints or
rules that exclude all are reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import accumulate, compress, islice, product
from operator import attrgetter, itemgetter
from typing import Any

from ptrain.algebra.legality import check, find_unsupported
from ptrain.axes.candidates import NOTHING_FIXED, AxisChoice, apply_choices, divisors
from ptrain.axes.data.candidates import OVERLAPS, UNITS, is_left_out
from ptrain.derivation.estimate import derive
from ptrain.errors import Fault, SpecError, input_error
from ptrain.plan.lower import built_in_facts
from ptrain.selection.algorithm1 import algorithm1, requirements
from ptrain.selection.deriver import BEST, Deriver, work_of
from ptrain.selection.fit import HOST_UNKNOWN, TIGHT
from ptrain.selection.job import ReadFacts, SearchedJob, read_or_kept, searched_job
from ptrain.selection.ranking import (
    KNOWN,
    SLACK,
    Demand,
    Lost,
    PlacementRanking,
    Ranked,
    Remedy,
    Scored,
    SearchGoal,
    cheapest,
    demand_of,
    folded,
    front_of,
    numbers,
    order_of,
    undominated,
)
from ptrain.selection.search import DataRow, Search, SearchResult
from ptrain.selection.space import (
    Candidate,
    batched,
    data_choices,
    degrees_over,
    inner_products,
    micro_batches,
    pipelines,
    sized,
    through_of,
    ways_to_keep,
)
from ptrain.selection.where import (
    QUANTITIES,
    RESULTS,
    Aspect,
    Constraint,
    Value,
    Where,
    keeping,
    parse,
    placements_of,
)
from ptrain.spec.dials import STOCK_BUCKET_BYTES, GradientSync, Overlap, SyncPolicy
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.units import format_memory

_BUCKETS = (STOCK_BUCKET_BYTES, 4 * STOCK_BUCKET_BYTES, 16 * STOCK_BUCKET_BYTES)
_SYNCS = tuple(
    SyncPolicy(gradients=when, reshard_after_forward=forward, reshard_after_backward=backward)
    for when in GradientSync
    for forward, backward in ((True, True), (False, True), (False, False))
)
_BESIDE = (
    *((overlap, None) for overlap in OVERLAPS),
    *((Overlap.BACKWARD, ahead) for ahead in range(3)),
)
Changes = tuple[tuple[str, Any], ...]


def neighbours(search: Search, candidate: Candidate) -> Iterator[Candidate]:
    """Yield legal candidates that differ in one dial, which the spec does not set, and satisfy
    constraints."""
    job = search.job
    rules = [rule for rule in job.where.constraints if rule.name not in RESULTS]
    for other in _changed(search, candidate):
        spec = other.spec(job.sized)
        if not is_left_out(spec, job.written) and all(rule.holds(spec) for rule in rules):
            several, through = other.micro > 1, through_of(other.pipeline)
            legality = search.legality
            if legality.within(
                other.within, other.kept, through, several=several
            ) and legality.pipeline(other.pipeline, spec.batch.accumulate):
                yield other


def _changed(search: Search, candidate: Candidate) -> Iterator[Candidate]:
    job = search.job
    for changes in _dials(search, candidate.data):
        yield replace(candidate, data=replace(candidate.data, changes=changes))
    for kept in search.ways_to_keep:
        if kept != candidate.kept:
            yield replace(candidate, kept=kept)
    spec = candidate.spec(job.sized)
    sizes = [micro for micro, _ in micro_batches(job.scored, spec.data_degree)]
    at = sizes.index(candidate.micro)
    for micro in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
        yield replace(candidate, micro=micro)
    ranks, left = candidate.pipeline.factors, job.devices
    for factor in (f for choice in candidate.within for f in choice.factors):
        left //= factor.degree
    for _, choices in pipelines(job.scored, left, job.written) if ranks else ():
        for choice in choices:
            if choice.factors == ranks and choice.changes != candidate.pipeline.changes:
                yield replace(candidate, pipeline=choice)


def _dials(search: Search, choice: AxisChoice) -> Iterator[Changes]:
    """Yield other changes of the data axes, one dial at a time."""
    written, said = search.job.written, dict(choice.changes)
    bucket = said.get("bucket_bytes", search.job.scored.bucket_bytes)
    offered: tuple[tuple[tuple[str, ...], Iterable[tuple[Any, ...]]], ...] = (
        (("sync",), ((written.value("sync", sync),) for sync in _SYNCS)),
        (("unit",), ((unit,) for unit in UNITS)),
        (("overlap", "prefetch"), _BESIDE),
        (("bucket_bytes",), ((size,) for size in _BUCKETS if size != bucket)),
    )
    for names, values in offered:
        free = [name == "sync" or not written.sets_field(name) for name in names]
        for value in values if choice.factors else ():
            others = dict(compress(zip(names, value, strict=True), free))
            changes = tuple({**said, **others}.items())
            if changes != choice.changes:
                yield changes


_TRIED, _PER_FLOW = 200, 2  # specs that are checked, and data choices per flow
_UNKNOWN = Fault(
    place="activations",
    finding="no degrees divide the devices, or no memory table covers these blocks",
    remedy=(
        "Use another `--devices`, loss, attention or model, or predict single placements with "
        "`ptrain predict`."
    ),
)


def why_none(search: Search) -> tuple[str, str]:
    """Return finding and remedy of a search without candidates under its constraints."""
    job = search.job
    rules = tuple(job.where.constraints)
    on = f"on {job.devices} devices"
    if rules and search.has(Where()):
        alone = [rule for rule in rules if not search.has(Where((rule,)))]
        needless = (rule for rule in rules if search.has(job.where.without(rule)))
        remedy = " Or: ".join(rule.remedy for rule in alone or needless)
        finding = f"no legal placement {on} satisfies {', '.join(rule.text for rule in rules)}"
        offered = _offered(search, alone[0]) if alone else ""
        return f"{finding}{offered}", remedy or "Remove one of them."
    fault = _common_fault(job, job.where) or _common_fault(job, Where()) or _UNKNOWN
    return f"no combination {on} is legal: {fault.finding}", fault.remedy


def why_not(search: Search, rules: tuple[Constraint, ...], others: Where) -> str:
    """Return the reason, in a few words, why no candidate satisfies `rules` together with `others`,
    the constraints of the last run; "" if the job has no such degrees."""
    job = search.job
    if others.constraints and search.has(Where(rules)):
        blame = [o.text for o in others.constraints if not search.has(Where((o, *rules)))]
        texts = blame or [other.text for other in others.constraints]
        return f"excluded by {', '.join(texts)}"
    free = replace(job, written=NOTHING_FIXED)
    if free != job and Search(free, search.work, search.pace).has(Where(rules)):
        return "excluded by values in the spec"
    fault = _common_fault(free, Where(rules))
    return f"none is legal: {fault.finding}" if fault else ""


def _offered(search: Search, rule: Constraint) -> str:
    """Return the values of a constraint's property for which candidates exist, as text; "" if
    none."""
    quantity, job = QUANTITIES[rule.name], search.job
    values: Iterable[Value] = quantity.words
    if quantity.is_placement:
        values = placements_of(Axis(rule.name.partition(".")[2]))
    elif not values:  # degrees, stages and micro-batches are divisors; 0 for no prefetch
        values = (0, *divisors(job.devices * job.base.batch.global_samples))
    there = [
        f"[{value}]" if quantity.is_placement else str(value)
        for value in values
        if search.has(Where((replace(rule, compare="=", bound=value),)))
    ]
    return f": {rule.name} can be {', '.join(there)}" if there else ""


def _common_fault(job: SearchedJob, where: Where) -> Fault | None:
    """Return the most common fault of candidates that satisfy constraints, or None."""
    faults = Counter(islice(_faults(job, where), _TRIED)).most_common(1)
    return faults[0][0] if faults else None


def _faults(job: SearchedJob, where: Where) -> Iterator[Fault]:
    """Yield the first fault of each of a sample of candidates that satisfy constraints."""
    base, written = job.sized, job.written
    ways = {
        axes: [c for c in some if where.admits(Aspect.DATA, apply_choices(base, (c,)))][:_PER_FLOW]
        for axes, some in data_choices(base, written).items()
    }
    for ranks, within in inner_products(base, job.devices, written):
        cut = apply_choices(base, within)
        for left, choices in pipelines(base, job.devices // ranks, written):
            flows = [c for c in choices if where.admits(Aspect.PIPELINE, apply_choices(base, (c,)))]
            if not flows or not where.admits(Aspect.WITHIN, cut):
                continue
            batches = list(micro_batches(base, left * cut.data_degree))
            sizes = [m for m, n in batches if where.admits(Aspect.BATCH, batched(base, m, n))]
            if not batches:
                samples, over = base.batch.global_samples, left * cut.data_degree
                yield Fault(
                    place="batch.global",
                    finding=f"a step's {samples} samples are not divisible by {over} data-parallel "
                    "ranks",
                    remedy=f"Use `batch.global={max(1, samples // over) * over}`.",
                )
            if not sizes:
                continue
            data = (
                sized(choice, degrees)
                for axes, some in ways.items()
                for degrees in (degrees_over(len(axes), left) if some else ())
                if where.admits(Aspect.RANKS, apply_choices(base, (sized(some[0], degrees),)))
                for choice in some
            )
            kept = written.kept or ways_to_keep(written.offload_tier)
            for flow, choice, way in product(flows, islice(data, _PER_FLOW), kept):
                tried = Candidate(
                    within=within, pipeline=flow, data=choice, micro=sizes[0], kept=way
                )
                # `job.base` has the programs and fp8 products, which are not scored.
                spec = tried.spec(job.base)
                yield from (*check(spec), *find_unsupported(spec))[:1]


_BEST_TRACED = 9  # candidates predicted exactly for a model that must be traced
_SEEDS = 3  # placements from which the descent starts: each has another local optimum
_OF_KIND = 2  # candidates of a well-known choice predicted before its descent
# Work in plain steps, around a seed and around a well-known choice.
_MOST_WORK, _WORK_OF_KIND = 1000, 6
_MOST_DEVICES = 2**13  # limit of the search for a number on which something fits


def select(
    source: str,
    overrides: Sequence[str] = (),
    *,
    cluster: str | None = None,
    devices: int | None = None,
    objective: str = "time",
    where: Sequence[str] = (),
    count: int | None = None,
    tokens: str | None = None,
    deadline: str | None = None,
    budget: float | None = None,
    margin: float | None = None,
    read: ReadFacts = read_or_kept,
    watch: Callable[[int, int], None] | None = None,
) -> PlacementRanking:
    """Search all legal placements of a model on a cluster, and rank the best ones.

    Args:
        source: A model name or file, or a spec in which `auto` or missing values are searched.
        overrides: Overrides as on the command line; the values that they set are not searched.
        cluster: The name or file of a cluster. Default: the cluster of the spec.
        devices: The number of devices. Default: all devices of the cluster.
        objective: `time` per step, `memory`, `devices` or `cost`.
        where: Conditions on figures that a placement must satisfy.
        count: How many candidates to predict exactly. Default: 150, or 9 for a model that must be
            traced.
        tokens: With the objectives `devices` and `cost`: the length of the training (`15T`).
        deadline: With the objective `devices`: the time limit (`30d`).
        budget: With the objective `devices`: the limit of the price, in the cluster's currency.
        margin: The part of a GPU's memory that a placement leaves free. Default: 0.05, or 0 if
            `where` limits `memory`. If nothing leaves the margin, placements without it are ranked.
        read: Reads the facts of models that must be traced.
        watch: Called with the numbers of derived and of wanted candidates.

    Returns:
        The ranking; `best` is its first row, and `spec` the best placement as a spec.

    Raises:
        SpecError: The job cannot be searched, or no number of devices satisfies the demand.

    Example:
        >>> import ptrain
        >>> ranking = ptrain.select("llama-tiny", cluster="laptop", devices=2, objective="memory")
        >>> ranking.spec.world_size
        2
    """
    job = searched_job(source, overrides, cluster=cluster, devices=devices, where=where, read=read)
    usual = BEST if job.stand_in is None else _BEST_TRACED
    if objective not in (goals := [goal.value for goal in SearchGoal]):
        known = f"Use one of {', '.join(goals)}."
        raise input_error("objective", f"there is no objective named {objective!r}", known)
    demand = demand_of(tokens, deadline, budget)
    if margin is None:
        margin = 0.0 if any(job.where.bounds("memory")) else TIGHT

    goal, count = SearchGoal(objective), count or usual
    chooser = Chooser(replace(job, margin=margin), goal, count=count, read=read)
    chooser.watch = watch or chooser.watch
    if not margin:
        return answer(chooser, demand)
    with suppress(SpecError):
        if (leaving := answer(chooser, demand)).best is not None:
            return leaving
    rows = {
        key: row for key, row in chooser.rows.items() if row
    }  # rows that fit need not be derived again
    without = replace(chooser, job=job, rows={**rows}, on_host=[])
    return replace(answer(without, demand), asked_margin=margin)


def answer(chooser: Chooser, demand: Demand | None) -> PlacementRanking:
    """Return the ranking on the chooser's devices, or on the number that its objective selects.
    Raise SpecError if a target or price is missing, or if no number of devices meets the target."""
    goal, most = chooser.objective, chooser.job.devices
    cluster = chooser.job.base.cluster
    if demand and demand.budget is not None and cluster and cluster.price is None:
        raise input_error(
            "--budget",
            f"the price of a device of {cluster.name} is unknown",
            "Set the price per device and hour, for example `cluster.price=2.5`.",
        )
    if goal is SearchGoal.COST:
        best = cheapest(numbered := tuple(_by_number(chooser)))
        if best is None:
            cause = chooser.unknown or "nothing fits"
            raise input_error("--objective", f"cost: {cause}", "Use `--objective memory`.")
        return _on_number(chooser, best[0], numbered)
    if goal is not SearchGoal.DEVICES:
        return chooser.choose()
    if demand is None:
        raise input_error(
            "--objective",
            "devices: the target is missing",
            "Set a target, for example `--tokens 1T --deadline 30d`.",
        )
    rows: tuple[tuple[int, Ranked], ...] = ()
    for number, row in _by_number(chooser):
        rows = (*rows, (number, row))
        if demand.is_met(row):
            return replace(_on_number(chooser, number, rows), demand=demand)
    last = "nothing fits"
    if rows:
        number, row = rows[-1]
        time, money = demand.figures(row)
        last = f"{number} devices need {time}" + f" at a cost of {money}" * (row.price is not None)
    raise input_error(
        "--objective",
        f"no number of devices up to {most} meets the target: {last}",
        "Use a later `--deadline` or a larger `--budget`.",
    )


def _on_number(
    chooser: Chooser, devices: int, rows: Iterable[tuple[int, Ranked]]
) -> PlacementRanking:
    """Return the ranking on one of the tried numbers of devices, with its best row among them."""
    ranking = chooser.on(devices).choose()
    tried = tuple(
        (number, ranking.best if number == devices and ranking.best else row)
        for number, row in rows
    )
    return replace(ranking, objective=chooser.objective, by_number=tried)


def _by_number(chooser: Chooser) -> Iterator[tuple[int, Ranked]]:
    """Yield the best row on each number of devices on which something fits."""
    yield from (
        (number, row)
        for number in numbers(chooser.job.devices)
        if (row := chooser.on(number).first()) is not None
    )


class Chooser(Deriver):
    """The ranking of one job's candidates, with the reasons why others lost."""

    def on(self, devices: int) -> Chooser:
        """Return a chooser for another number of devices, which ranks by time unless by memory."""
        base, cluster = self.job.base, self.job.base.cluster
        if cluster is not None and cluster.devices < devices:
            base = base.with_fields(cluster=replace(cluster, devices=devices))
        job = replace(self.job, base=base, devices=devices)
        by_time = self.objective not in (SearchGoal.TIME, SearchGoal.MEMORY)
        goal = SearchGoal.TIME if by_time else self.objective
        return Chooser(
            job, goal, machine=self.machine, count=self.count, read=self.read, watch=self.watch
        )

    def first(self) -> Ranked | None:
        """Return the best row that fits, predicted exactly; None if nothing fits."""
        return next(self._fitting(self.search.run(self.job.where).best, 1), None)

    # -- the answer

    def choose(self) -> PlacementRanking:
        """Return the ranking with its alternatives; raise SpecError if the search has no
        candidates, or if all that seemed to fit do not."""
        result = self.search.run(self.job.where)
        if not result.counts.scored:
            raise input_error("--devices", *why_none(self.search))
        rows = self._best(result)
        derived = self.derived
        on_front = list(self._fitting(result.front, len(result.front))) if rows else []
        lost = tuple(self._of_kinds(result, rows)) if rows else ()
        # the descent of a well-known choice may find a better row
        known = (choice.best for choice in lost)
        rows = self._ordered((*rows, *(row for row in known if row and self._obeys(row))))
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
        if not rows and any(memory.host_memory is None for memory in self.on_host):
            raise input_error("cluster", *HOST_UNKNOWN)
        if not rows and self.on_host:
            least_on_host = min(memory.host_needed_bytes for memory in self.on_host)
            raise input_error(
                "cluster.host_memory",
                "no candidate fits: candidates that fit the device need "
                f"{format_memory(least_on_host)} or more of host memory per node",
                "Search more devices with `--devices N`, or set `cluster.host_memory` of a "
                "larger host.",
            )
        if not rows and result.counts.fitting:
            if not derived and (fault := _common_fault(self.job, self.job.where)):
                raise input_error(fault.place, f"no candidate runs: {fault.finding}", fault.remedy)
            raise input_error(
                "--exact",
                f"{result.counts.fitting} candidates fit by the estimate, but none of the "
                f"{derived} that were predicted exactly fits",
                "Use a larger `--exact`, or `--objective memory`.",
            )
        if not rows:
            bound = result.least.peak if result.least else float("inf")
            least, remedies = self._least(result), tuple(self._remedies(bound))
            return replace(selection, least=least, remedies=remedies)
        best = rows[0].spec
        winner = derive(best, self._facts(best), self._timing(best))
        return replace(selection, lost=lost, winner=winner)

    def _best(self, result: SearchResult) -> list[Ranked]:
        """Return the exact rows. If no traced part fits, try the candidate with least memory. Raise
        PtrainError if nothing that was tried can be predicted."""
        rows = list(self._fitting(result.best, self.count))
        if self.cuts is not None:
            if not rows and (least := self._least(result)) is not None:
                rows = [least] if self._obeys(least) else []
            refusals = self.cuts.refusals
            if not rows and refusals and refusals.keys() >= self.cuts.facts.keys():
                raise next(iter(refusals.values()))
            if rows:
                self.cuts.most = 0  # no further traces
        placements = {row.spec.factors: row for row in sorted(rows, key=self._order, reverse=True)}
        seeds = sorted(placements.values(), key=self._order)[:_SEEDS]
        return [*rows, *(row for seed in seeds for row in self._descended(seed, _MOST_WORK))]

    def _order(self, row: Ranked) -> tuple[float, ...]:
        return order_of(self.objective, row)

    def _ordered(self, rows: Iterable[Ranked]) -> list[Ranked]:
        known = {row.closed.candidate: row for row in rows}
        return undominated(sorted(folded(known.values()), key=self._order))

    def _descended(self, best: Ranked, work: float) -> Iterator[Ranked]:
        """Yield the rows around `best`, then around each better row, as long as they improve. Each
        round derives at most `work` plain steps."""
        while True:
            around = map(self.search.score, neighbours(self.search, best.closed.candidate))
            near = sorted(filter(partial(self._may_beat, best), around), key=self._key)
            taken = accumulate(work_of(scored.candidate.spec(self.job.base)) for scored in near)
            some = compress(near, (until <= work for until in taken))
            rows = [row for scored in some for row in self._fitting([scored], 1)]
            yield from rows
            least = min(rows, key=self._order, default=best)
            if self._order(least) >= self._order(best):
                return
            best = least

    def _may_beat(self, row: Ranked, scored: Scored) -> bool:
        """Return True if a candidate may fit and beat a row, within the error of estimates."""
        if self.objective is SearchGoal.MEMORY:
            return scored.peak <= row.closed.peak * SLACK
        is_fast = scored.seconds <= row.closed.seconds * SLACK
        return is_fast and scored.peak <= self.job.room * SLACK

    # -- what lost, and what would fit

    def _of_kinds(self, result: SearchResult, ranked: Sequence[Ranked]) -> Iterator[Lost]:
        """Yield well-known choices and the paper's recommendation, each with its best row or the
        reason why there is none."""
        base, devices = self.job.base, self.job.devices
        # rules of well-known choices read no batch and no activations
        placed = [
            (row.smallest.candidate(row).placed(base), row)
            for row in result.placements
            if row.smallest
        ]
        for name, rules in KNOWN.items():
            where = [rule.replace("N", str(devices)) for rule in rules]
            row, why = self._like(placed, ranked, where)
            if row or why:
                yield Lost(name=name, best=row, why=why)
        best = ranked[0].closed.candidate
        for near in neighbours(self.search, best):
            if near.kept != best.kept and (row := self.exactly(self.search.score(near))):
                name = f"the placement of the best, recompute={keeping(near.kept)}"
                yield Lost(name=name, best=row, why="")
        assert base.cluster is not None, "a job that is searched for has a cluster"
        advised = algorithm1(requirements(built_in_facts(self.job.sized), base.cluster, devices))
        name = f"the paper's Algorithm 1: {advised.advice}"
        if not advised.degrees:
            yield Lost(name=name, best=None, why="the search found one")
            return
        said = [f"mesh.{axis}={degree}" for axis, degree, _ in advised.degrees]
        said += [f"placement.{axis}={modes}" for axis, _, modes in advised.degrees]
        row, why = self._like(placed, ranked, said)
        yield Lost(name=name, best=row, why=why)

    def _like(
        self,
        placed: Sequence[tuple[Spec, DataRow]],
        ranked: Sequence[Ranked],
        where: Iterable[str],
    ) -> tuple[Ranked | None, str]:
        """Return the best row that satisfies further constraints, or None and the reason."""
        rules = tuple(map(parse, where))

        def obeys(spec: Spec) -> bool:
            return all(rule.holds(spec) for rule in rules)

        alike = [row for spec, row in placed if obeys(spec)]
        if not alike:
            return None, why_not(self.search, rules, self.job.where)
        entries = merge(*(row.best for row in alike), key=itemgetter(0, 1, 2))
        rows = list(self._fitting((block.scored(row) for *_, block, row in entries), _OF_KIND))
        rows += (row for row in ranked if obeys(row.spec))
        if rows:
            near = self._descended(min(rows, key=self._order), _WORK_OF_KIND)
            rows += (row for row in near if obeys(row.spec))
            return self._ordered(rows)[0], ""
        if self.cuts is not None:
            return None, "would need another trace; use a larger `--exact`"
        least = self.exactly(min(alike, key=attrgetter("least")).tightest)
        if least is not None and self._obeys(least):  # it may be far from the fastest that fits
            return None, "the fastest by the estimate do not fit; the one with least memory does"
        return least, ""

    def _key(self, scored: Scored) -> float:
        return scored.peak if self.objective is SearchGoal.MEMORY else scored.seconds

    def _least(self, result: SearchResult) -> Ranked | None:
        """Return the exact row of the candidate with the smallest estimate of memory."""
        return self.exactly(result.least) if result.least else None

    def _remedies(self, least: float) -> Iterator[Remedy]:
        """Yield changes that make something fit: each constraint left out, then twice as many
        devices each time, while the least estimate of memory falls."""
        for rule in self.job.where.constraints:
            others = self.search.run(self.job.where.without(rule))
            if (row := next(self._fitting(others.best, 1), None)) is not None:
                yield Remedy(change=rule.change, fitting=row)
        devices = 2 * self.job.devices
        while devices <= _MOST_DEVICES:
            other = self.on(devices)
            result = other.search.run(other.job.where)
            if (row := next(other._fitting(result.best, 1), None)) is not None:
                yield Remedy(change=f"--devices {devices}", fitting=row)
            if row is not None or (result.least and result.least.peak >= least):
                return
            least, devices = result.least.peak if result.least else least, 2 * devices
