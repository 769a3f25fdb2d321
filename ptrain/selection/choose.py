"""`select`: which placement of a job, by the search's closed forms and, of the best, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ptrain.algebra.legality import is_sound
from ptrain.derivation.estimate import derive
from ptrain.errors import refused
from ptrain.plan.lower import own_facts
from ptrain.selection.algorithm1 import algorithm1, requirements
from ptrain.selection.cuts import ReadFacts, TracedCuts, read_or_kept
from ptrain.selection.demand import Demand, cheapest, demand_of, numbers
from ptrain.selection.deriver import BEST, Deriver
from ptrain.selection.fit import HOST_UNKNOWN
from ptrain.selection.infeasible import why_none, why_not, why_too_large
from ptrain.selection.job import searched_job
from ptrain.selection.known import KNOWN, about, reason
from ptrain.selection.ranking import Lost, PlacementRanking, Remedy, front_of, order_of
from ptrain.selection.recipe import reasons
from ptrain.selection.task import Ranked, Scored, SearchGoal, SearchResult, folded, on_more
from ptrain.selection.where import Where, parse
from ptrain.units import format_bytes

_BEST_TRACED = 6  # candidates that are derived exactly of a model that has to be traced
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
    read: ReadFacts = read_or_kept,
) -> PlacementRanking:
    """Return the ranking of all legal placements of a model, or of a spec with `auto` in it, on so
    many devices of a cluster; `count` of them are derived exactly: 100, and 6 of a model that no
    table tells of, whose facts `read` gives. With the objective `devices` on the fewest on which
    `tokens` are trained within a `deadline` (30d) or a `budget`, with `cost` on as many as take
    least for a token. Raises SpecError for a job that cannot be searched."""
    job = searched_job(source, overrides, cluster=cluster, devices=devices, where=where)
    usual = BEST if job.stand_in is None else _BEST_TRACED
    chooser = Chooser(job, SearchGoal(objective), count=count or usual, read=read)
    return answer(chooser, demand_of(tokens, deadline, budget))


def answer(chooser: Chooser, demand: Demand | None) -> PlacementRanking:
    """Return the ranking on the chooser's devices, or on as many as its objective asks for. Raises
    SpecError where no number of devices does."""
    goal, most = chooser.objective, chooser.job.devices
    cluster = chooser.job.base.cluster
    if demand and demand.budget is not None and cluster and cluster.price is None:
        finding = f"nobody says what a device of {cluster.name} costs"
        raise refused("--budget", finding, "write cluster.price=2.5, of a device and hour")
    if goal is SearchGoal.COST:
        best = cheapest(numbered := tuple(_by_number(chooser)))
        if best is None:
            raise refused("--objective", f"cost: {_no_time(chooser)}", "write --objective memory")
        return _on_number(chooser, best[0], numbered)
    if goal is not SearchGoal.DEVICES:
        return chooser.choose()
    if demand is None:
        finding = "devices: the fewest for what, nobody says"
        raise refused("--objective", finding, "write --tokens 1T --deadline 30d")
    rows: tuple[tuple[int, Ranked], ...] = ()
    for number, row in _by_number(chooser):
        rows = (*rows, (number, row))
        if demand.is_met(row):
            return replace(_on_number(chooser, number, rows), demand=demand)
    last = "nothing fits"
    if rows:
        number, row = rows[-1]
        last = f"{number} devices take {demand.described(row)}"
    finding = f"no number of devices up to {most} meets it: {last}"
    raise refused("--objective", finding, "write a later deadline or a larger budget")


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
    for number in numbers(chooser.job.devices):
        row = chooser.on(number).first()
        if row is not None:
            yield number, row


def _no_time(chooser: Chooser) -> str:
    return chooser.unknown or "nothing fits"


class Chooser(Deriver):
    """Ranks the candidates of one job, and says why others lost."""

    def on(self, devices: int) -> Chooser:
        """Return the same on another number of devices, by time."""
        job = replace(self.job, base=on_more(self.job.base, devices), devices=devices)
        by_time = self.objective not in (SearchGoal.TIME, SearchGoal.MEMORY)
        goal = SearchGoal.TIME if by_time else self.objective
        return Chooser(job, goal, machine=self.machine, count=self.count, read=self.read)

    def first(self) -> Ranked | None:
        """Return the best that fits by closed form, exactly."""
        return next(self._fitting(self.search.run(self.job.where).best, 1), None)

    # -- the answer

    def choose(self) -> PlacementRanking:
        """Return the ranking, and what its figures say of the rest."""
        result = self.search.run(self.job.where)
        if not result.counts.scored and self.search.has_too_large:
            raise refused(*why_too_large(self.search))
        if not result.counts.scored:
            raise refused("--devices", *why_none(self.search))
        rows = self._best(result)
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
        if not rows and self.is_host_unknown:
            raise refused("cluster", *HOST_UNKNOWN)
        if not rows and self.least_on_host:
            raise refused(
                "cluster.host_memory",
                "no candidate fits: those that fit a device need "
                f"{format_bytes(self.least_on_host)} or more of a node's host",
                "Search more devices: `--devices N`; or write the memory of a larger host.",
            )
        if not rows and result.counts.fitting:
            raise refused(
                "--exact",
                f"of {result.counts.fitting} candidates that fit by closed form none of the "
                f"{derived} that were derived does",
                "write a larger --exact, or --objective memory",
            )
        if not rows:
            return self._without_fit(selection, result)
        best = rows[0].spec
        derivation = derive(best, self._facts(best), self._timing(best))
        return replace(
            selection, lost=tuple(self._lost(rows[0])), reasons=tuple(reasons(derivation))
        )

    def _best(self, result: SearchResult) -> list[Ranked]:
        """The ranking. Where nothing of the few cuts that are traced fits, that which needs least
        is tried. Raises PtrainError where nothing of what was tried can be derived."""
        rows = folded(self._fitting(result.best, self.count))
        rows.sort(key=lambda row: order_of(self.objective, row))
        if self.cuts is None:
            return rows
        if not rows:
            least = self._least(result)
            self.derived += least is not None
            rows = [least] if least and least.memory.fits and self._obeys(least) else []
        if not self.derived and self.cuts.refusals:
            raise next(iter(self.cuts.refusals.values()))
        if rows:
            self.cuts.close()
        return rows

    # -- what lost, and what would fit

    def _by_algorithm1(self, best: Ranked) -> Lost:
        """What the paper's selection says, and how it does here."""
        base, devices = self.job.base, self.job.devices
        assert base.cluster is not None, "a job that is searched for has a cluster"
        advised = algorithm1(requirements(own_facts(base), base.cluster, devices))
        name = f"the paper's Algorithm 1: {advised.advice}"
        if not advised.degrees:
            return Lost(name=name, best=None, why="the search has one")
        where = [f"mesh.{axis}={degree}" for axis, degree, _ in advised.degrees]
        where += [f"placement.{axis}={modes}" for axis, _, modes in advised.degrees]
        return self._like(name, where, best)

    def _like(self, name: str, where: Iterable[str], best: Ranked) -> Lost:
        """The best that obeys constraints besides the job's own."""
        rules = tuple(map(parse, where))
        result = self.search.run(Where((*self.job.where.constraints, *rules)))
        if not result.counts.scored:
            return Lost(name=name, best=None, why=why_not(self.search, rules, self.job.where))
        if self.cuts is not None:
            return self._traced_or_about(self.cuts, name, result, best)
        row = next(self._fitting(result.best, 1), None) or self._least(result)
        return Lost(name=name, best=row, why=reason(row, best, self.objective))

    def _traced_or_about(
        self, cuts: TracedCuts, name: str, result: SearchResult, best: Ranked
    ) -> Lost:
        """The same of a model that is traced: exactly where the best's cut is, else about."""
        least = result.counts.least
        scored = [*result.best]
        if least is not None:
            scored.append(Scored(candidate=least[1], peak=least[0], seconds=float("inf")))
        specs = ((closed, closed.candidate.spec(self.job.base)) for closed in scored)
        legal = (pair for pair in specs if is_sound(pair[1]))
        closed, spec = next(legal, (None, None))
        if closed is None or spec is None:
            return Lost(name=name, best=None, why="none that was scored is legal")
        row = next(self._fitting(result.best, 1), None) if cuts.is_known(spec) else None
        if row is not None:
            return Lost(name=name, best=row, why=reason(row, best, self.objective))
        why = about(closed, best, self.objective)
        return Lost(name=name, best=None, why=why, closed=(spec, closed))

    def _lost(self, best: Ranked) -> Iterator[Lost]:
        for known in KNOWN:
            where = known.where(self.job.devices)
            if where is None:
                continue
            yield self._like(known.name, where, best)
        yield self._by_algorithm1(best)

    def _least(self, result: SearchResult) -> Ranked | None:
        """The exact figures of what needs least by closed form."""
        least = result.counts.least
        if least is None:
            return None
        peak, candidate = least
        return self.exactly(Scored(candidate=candidate, peak=peak, seconds=0.0))

    def _without_fit(self, selection: PlacementRanking, result: SearchResult) -> PlacementRanking:
        return replace(selection, least=self._least(result), remedies=tuple(self._remedies()))

    def _remedies(self) -> Iterator[Remedy]:
        """Each constraint left out; then the fewest devices, twice as many each time."""
        constraints = self.job.where.constraints
        for rule in constraints:
            others = Where(tuple(other for other in constraints if other is not rule))
            row = next(self._fitting(self.search.run(others).best, 1), None)
            if row is not None:
                yield Remedy(change=rule.change, fitting=row)
        devices = 2 * self.job.devices
        while devices <= _MOST_DEVICES:
            row = self.on(devices).first()
            if row is not None:
                yield Remedy(change=f"--devices {devices}", fitting=row)
                return
            devices *= 2
