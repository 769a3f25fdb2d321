"""`select`: which placement of a job is best, by the search's estimates and exactly for the best of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import accumulate, compress
from operator import attrgetter, itemgetter

from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError, refused
from ptrain.plan.lower import own_facts
from ptrain.selection.algorithm1 import algorithm1, requirements
from ptrain.selection.cuts import ReadFacts, read_or_kept
from ptrain.selection.demand import Demand, cheapest, demand_of, numbers
from ptrain.selection.deriver import BEST, Deriver, work_of
from ptrain.selection.descent import neighbours
from ptrain.selection.fit import HOST_UNKNOWN, TIGHT
from ptrain.selection.infeasible import why_none, why_not
from ptrain.selection.job import searched_job
from ptrain.selection.quantities import keeping, recompute_of
from ptrain.selection.ranking import (
    KNOWN,
    Lost,
    PlacementRanking,
    Remedy,
    front_of,
    order_of,
    recomputing,
    undominated,
)
from ptrain.selection.search import DataRow, SearchResult
from ptrain.selection.task import (
    SLACK,
    Ranked,
    Scored,
    SearchGoal,
    folded,
    on_more,
)
from ptrain.selection.where import Where, parse
from ptrain.spec.spec import Spec
from ptrain.units import format_memory

_BEST_TRACED = 9  # candidates that are derived exactly of a model that has to be traced
_SEEDS = 3  # placements whose dials are descended over
_OF_KIND = 2  # candidates of a well-known choice that are derived before its dials
_MOST_WORK, _WORK_OF_KIND = 1000, 12  # plain steps around a seed, and around a well-known choice
_MOST_DEVICES = 2**13  # on which something is looked for that fits


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
    """Search all legal placements of a model on a cluster, the best first.

    Args:
        source: A model name or file, or a spec in which `auto` or missing values are searched.
        overrides: Overrides as on the command line; what they set is not searched.
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
        watch: Called with the number of candidates that are derived and of those that are wanted.

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
        raise refused("objective", f"there is no objective named {objective!r}", known)
    demand = demand_of(tokens, deadline, budget)
    if margin is None:
        margin = 0.0 if any(job.where.bounds("memory")) else TIGHT

    goal, count = SearchGoal(objective), count or usual
    chooser = Chooser(replace(job, margin=margin), goal, count=count, read=read)
    chooser.watch = watch or chooser.watch
    if not margin:
        return answer(chooser, demand)
    with suppress(SpecError):
        leaving = answer(chooser, demand)
        if leaving.best is not None or leaving.is_far_from_fitting:
            return leaving
    # what was derived is not derived again
    without = replace(chooser, job=job, exceeding={}, is_host_unknown=False, least_on_host=0)
    return replace(answer(without, demand), asked_margin=margin)


def answer(chooser: Chooser, demand: Demand | None) -> PlacementRanking:
    """Return the ranking on the chooser's devices, or on as many as its objective asks for. Raises
    SpecError where no number of devices does."""
    goal, most = chooser.objective, chooser.job.devices
    cluster = chooser.job.base.cluster
    if demand and demand.budget is not None and cluster and cluster.price is None:
        raise refused(
            "--budget",
            f"the price of a device of {cluster.name} is unknown",
            "Set the price per device and hour, for example `cluster.price=2.5`.",
        )
    if goal is SearchGoal.COST:
        best = cheapest(numbered := tuple(_by_number(chooser)))
        if best is None:
            cause = chooser.unknown or "nothing fits"
            raise refused("--objective", f"cost: {cause}", "Use `--objective memory`.")
        return _on_number(chooser, best[0], numbered)
    if goal is not SearchGoal.DEVICES:
        return chooser.choose()
    if demand is None:
        raise refused(
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
        last = f"{number} devices need {demand.described(row)}"
    raise refused(
        "--objective",
        f"no number of devices up to {most} meets the target: {last}",
        "Use a later `--deadline` or a larger `--budget`.",
    )


def _on_number(
    chooser: Chooser, devices: int, rows: Iterable[tuple[int, Ranked]]
) -> PlacementRanking:
    """The ranking on one of the numbers that were tried, with its best among these."""
    ranking = chooser.on(devices).choose()
    tried = tuple(
        (number, ranking.best if number == devices and ranking.best else row)
        for number, row in rows
    )
    return replace(ranking, objective=chooser.objective, by_number=tried)


def _by_number(chooser: Chooser) -> Iterator[tuple[int, Ranked]]:
    """The best on each number of devices on which something fits."""
    yield from (
        (number, row)
        for number in numbers(chooser.job.devices)
        if (row := chooser.on(number).first()) is not None
    )


class Chooser(Deriver):
    """Ranks the candidates of one job, and says why others lost."""

    def on(self, devices: int) -> Chooser:
        """Return the same on another number of devices, by time."""
        job = replace(self.job, base=on_more(self.job.base, devices), devices=devices)
        by_time = self.objective not in (SearchGoal.TIME, SearchGoal.MEMORY)
        goal = SearchGoal.TIME if by_time else self.objective
        return Chooser(
            job, goal, machine=self.machine, count=self.count, read=self.read, watch=self.watch
        )

    def first(self) -> Ranked | None:
        """Return the best that fits, exactly."""
        return next(self._fitting(self.search.run(self.job.where).best, 1), None)

    # -- the answer

    def choose(self) -> PlacementRanking:
        """Return the ranking, and what its figures say of the rest."""
        result = self.search.run(self.job.where)
        if not result.counts.scored:
            raise refused("--devices", *why_none(self.search))
        rows = self._best(result)
        derived = self.derived
        on_front = list(self._fitting(result.front, len(result.front))) if rows else []
        lost = tuple(self._of_kinds(result, rows)) if rows else ()
        # a well-known choice may be what the dials of others lead to
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
        if not rows and self.is_host_unknown:
            raise refused("cluster", *HOST_UNKNOWN)
        if not rows and self.least_on_host:
            raise refused(
                "cluster.host_memory",
                "no candidate fits: candidates that fit the device need "
                f"{format_memory(self.least_on_host)} or more of host memory per node",
                "Search more devices with `--devices N`, or set `cluster.host_memory` of a "
                "larger host.",
            )
        if not rows and result.counts.fitting:
            raise refused(
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
        """The ranking. Where nothing of the few cuts that are traced fits, that which needs least
        is tried. Raises PtrainError where nothing of what was tried can be derived."""
        rows = list(self._fitting(result.best, self.count))
        if self.cuts is not None:
            if not rows and (least := self._least(result)) is not None:
                rows = [least] if self._obeys(least) else []
            refusals = self.cuts.refusals
            if not rows and refusals and refusals.keys() >= self.cuts.facts.keys():
                raise next(iter(refusals.values()))
            if rows:
                self.cuts.close()
        placements = {row.spec.factors: row for row in sorted(rows, key=self._order, reverse=True)}
        seeds = sorted(placements.values(), key=self._order)[:_SEEDS]
        return [*rows, *(row for seed in seeds for row in self._descended(seed, _MOST_WORK))]

    def _order(self, row: Ranked) -> tuple[float, ...]:
        return order_of(self.objective, row)

    def _ordered(self, rows: Iterable[Ranked]) -> list[Ranked]:
        """Rows by the objective, each once."""
        known = {row.closed.candidate: row for row in rows}
        return undominated(sorted(folded(known.values()), key=self._order))

    def _descended(self, best: Ranked, work: float) -> Iterator[Ranked]:
        """What is derived around a row, and around what is better than it, as long as that is. Each
        time no more is derived than takes the work of so many plain steps."""
        while True:
            near = sorted(filter(partial(self._may_beat, best), self._around(best)), key=self._key)
            taken = accumulate(work_of(scored.candidate.spec(self.job.base)) for scored in near)
            some = compress(near, (until <= work for until in taken))
            around = [row for scored in some for row in self._fitting([scored], 1)]
            yield from around
            least = min(around, key=self._order, default=best)
            if self._order(least) >= self._order(best):
                return
            best = least

    def _around(self, row: Ranked) -> Iterator[Scored]:
        return map(self.search.score, neighbours(self.search, row.closed.candidate))

    def _may_beat(self, row: Ranked, scored: Scored) -> bool:
        """Whether a candidate may fit and be better than a row, as far as estimates are away."""
        if self.objective is SearchGoal.MEMORY:
            return scored.peak <= row.closed.peak * SLACK
        is_fast = scored.seconds <= row.closed.seconds * SLACK
        return is_fast and scored.peak <= self.search.task.room * SLACK

    # -- what lost, and what would fit

    def _of_kinds(self, result: SearchResult, ranked: Sequence[Ranked]) -> Iterator[Lost]:
        """Well-known choices and what the paper's selection says by name, with the best of their
        kind, or why there is none."""
        base, devices = self.job.base, self.job.devices
        placed = [(row.first.candidate.spec(base), row) for row in result.placements]
        for known in (*KNOWN, *recomputing(ranked[0].spec)):
            if (where := known.where(self.job)) is not None:
                row, why = self._like(placed, ranked, where, known.kept)
                if row is not None or not known.kept:
                    yield Lost(name=known.name, best=row, why=why)
        assert base.cluster is not None, "a job that is searched for has a cluster"
        advised = algorithm1(requirements(own_facts(self.job.sized), base.cluster, devices))
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
        kept: str = "",
    ) -> tuple[Ranked | None, str]:
        """The best that obeys more constraints and keeps activations so, or why there is none."""
        rules = tuple(map(parse, where))

        def obeys(spec: Spec) -> bool:
            return kept in ("", recompute_of(spec)) and all(rule.holds(spec) for rule in rules)

        alike = [row for spec, row in placed if all(rule.holds(spec) for rule in rules)]
        if not alike:
            return None, why_not(self.search, rules, self.job.where)
        entries = merge(*(row.best for row in alike), key=itemgetter(0, 1, 2))
        may_fit = (
            block.scored(row) for *_, block, row in entries if kept in ("", keeping(block.kept))
        )
        rows = list(self._fitting(may_fit, _OF_KIND))
        rows += (row for row in ranked if obeys(row.spec))
        if rows:
            near = self._descended(min(rows, key=self._order), _WORK_OF_KIND)
            rows += (row for row in near if obeys(row.spec))
            return self._ordered(rows)[0], ""
        if self.cuts is not None:
            return None, "would need another trace; use a larger `--exact`"
        small: Scored | None = min(alike, key=attrgetter("least")).tightest
        if kept:
            best = (entry for row in alike for entry in row.best)
            some = (b.scored(row) for *_, b, row in best if keeping(b.kept) == kept)
            small = min(some, key=attrgetter("peak"), default=None)
        if small is None:
            return None, "none fits by the estimate"
        least = self.exactly(small)
        if least is not None and self._obeys(least):  # which may be far from the fastest that fits
            return None, "the fastest by the estimate do not fit; the one with least memory does"
        return least, ""

    def _key(self, scored: Scored) -> float:
        return scored.peak if self.objective is SearchGoal.MEMORY else scored.seconds

    def _least(self, result: SearchResult) -> Ranked | None:
        """The exact figures of the candidate with the smallest estimate of memory."""
        return self.exactly(result.least) if result.least else None

    def _remedies(self, least: float) -> Iterator[Remedy]:
        """Each constraint left out; then the fewest devices, twice as many each time, as long as
        the least estimate of memory falls."""
        constraints = self.job.where.constraints
        for rule in constraints:
            others = Where(tuple(other for other in constraints if other is not rule))
            if (row := next(self._fitting(self.search.run(others).best, 1), None)) is not None:
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
