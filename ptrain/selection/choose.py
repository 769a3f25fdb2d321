"""`select`: which placement of a job is best, by the search's estimates and exactly for the best of
them; and the notes' recipe for a batch and the lecture's procedure (fit, batch, throughput)
as sentences with the figures of one spec.

gbs = mbs x grad_acc x dp. Convergence sets the global batch; the micro-batch is the largest that
fits; data ranks come before accumulation, which fills the gap. Beyond some 512 data ranks the notes
see throughput fall. Axes are added by their cost: ZeRO-3, then tp within a node, then pp across
nodes, then cp for sequences and ep for experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, compress
from operator import attrgetter

from ptrain.axes.context.attention import attention_of
from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of
from ptrain.axes.pipeline.simulate import simulate
from ptrain.cost import Phase, State, busiest
from ptrain.derivation.estimate import Derivation, derive
from ptrain.derivation.interconnect import link
from ptrain.derivation.paper import reconstruction_unit, state_sizes
from ptrain.errors import SpecError, refused
from ptrain.plan.lower import own_facts
from ptrain.selection.algorithm1 import algorithm1, requirements
from ptrain.selection.cuts import ReadFacts, read_or_kept
from ptrain.selection.demand import Demand, cheapest, demand_of, numbers
from ptrain.selection.deriver import BEST, Deriver, work_of
from ptrain.selection.descent import neighbours
from ptrain.selection.fit import HOST_UNKNOWN, TIGHT, Fit, fit, host_bytes, host_text, room_text
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
    reason,
    recomputing,
    undominated,
)
from ptrain.selection.task import (
    SLACK,
    Ranked,
    Scored,
    SearchedPlacement,
    SearchGoal,
    SearchResult,
    folded,
    on_more,
)
from ptrain.selection.where import Where, parse
from ptrain.spec.batch import batch_lines
from ptrain.spec.cluster import Cluster
from ptrain.spec.placement import DATA_AXES, REDUCED_AXES, TOKEN_AXES, Axis, Factor, R
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes, format_memory

DATA_LIMIT = 512  # data ranks, about which the notes see throughput per device fall
_SHARDING = (Axis.DP_SHARD, *TOKEN_AXES)
_OF_TOKENS = {axis.value for axis in TOKEN_AXES}
_MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


def reasons(derivation: Derivation) -> list[str]:
    """Return why a spec is as it is: the lecture's three steps with their figures, then each axis
    in the order in which to reach for it."""
    spec, memory_fit = derivation.spec, fit(derivation.spec, derivation.exact)
    return [
        _fit_reason(derivation, memory_fit),
        _batch_reason(spec),
        *batch_lines(spec.batch, spec.data_degree),
        *_throughput_reasons(derivation),
        *axis_reasons(derivation),
    ]


def _fit_reason(derivation: Derivation, memory_fit: Fit) -> str:
    """First: does one step fit, and what of it are states."""
    states = _states(derivation)
    if memory_fit.peak_bytes is None or memory_fit.device_memory is None:
        return f"fit: unknown; model states are {states} per rank"
    word = {True: "fits", False: "does not fit", None: f"unknown: {memory_fit.unknown}"}
    tight = ", but tight" if memory_fit.is_tight else ""
    host = f", {host_text(memory_fit)}" if host_text(memory_fit) else ""
    return (
        f"fit: {word[memory_fit.fits]}{tight}: peak "
        f"{format_memory(memory_fit.peak_bytes)}{room_text(memory_fit)}{host}; model states "
        f"are {states} per rank"
    )


def _batch_reason(spec: Spec) -> str:
    """Second: the global batch by data ranks before accumulation."""
    batch, ranks = spec.batch, spec.data_degree
    product = f"{batch.micro} micro × {batch.accumulate} accumulated × {ranks} data"
    if batch.accumulate == 1:
        rest = (
            "no gradient accumulation; more data-parallel ranks would need a smaller "
            "micro-batch or stay idle"
        )
    else:
        once = batch.accumulate * ranks
        rest = f"more data-parallel ranks would reduce accumulation; {once} ranks need none"
    return f"batch: {batch.global_samples} = {product}; {rest}"


def _throughput_reasons(derivation: Derivation) -> Iterator[str]:
    """Third: what keeps a rank from computing: the limit of data ranks, and the bubble."""
    spec = derivation.spec
    if spec.data_degree > DATA_LIMIT:
        yield (
            f"throughput: {spec.data_degree} data-parallel ranks exceed about {DATA_LIMIT}, "
            "above which the notes report falling throughput per device because ring latency "
            "grows with the ranks; tp and pp reduce this "
            f"number{_waits(derivation, *DATA_AXES)}"
        )
    if (pipeline := pipeline_of(spec)) is not None:
        simulation = simulate(schedule_of(spec))
        yield (
            f"throughput: {spec.pipeline.schedule} on {pipeline.ranks} ranks has a bubble of "
            f"{simulation.bubble_fraction:.1%} of the step with {pipeline.microbatches} "
            "micro-batches, if stages are equal"
        )


def axis_reasons(derivation: Derivation) -> list[str]:
    """Return a sentence for each axis in the order in which to reach for it: why it is there, or
    why it need not be, with what it sends per rank and step."""
    return [
        _sharding_reason(derivation),
        _tensor_reason(derivation),
        _stages_reason(derivation),
        *_context_reason(derivation),
    ]


def _sharding_reason(derivation: Derivation) -> str:
    spec = derivation.spec
    whole = sum(state_sizes(spec, derivation.facts).values())
    states = f"{format_memory(whole)} of states"
    sent = _sent(derivation, *REDUCED_AXES, of_activations=False)
    over = [f"{f.axis} {f.degree}" for f in spec.factors if f.axis in _SHARDING and _cuts(f)]
    if over:
        return (
            f"1. {' × '.join(over)}, the first choice: each rank holds {_states(derivation)} "
            f"of {states}; {sent}{_waits(derivation, *REDUCED_AXES, is_of_states=True)}"
        )
    room = spec.cluster.usable_memory if spec.cluster else 0
    if whole < room:
        usable = f"the {format_memory(room)} of usable device memory"
        return f"1. no dp_shard: {states} are less than {usable}; {sent}"
    return f"1. no dp_shard, although it is the first choice and would shard {states}; {sent}"


def _states(derivation: Derivation) -> str:
    """Return what a rank has of Θ, Ω and G on its device, and of what is on a host its share."""
    exact = derivation.exact
    device = format_memory(sum(exact.bytes_of(state) for state in _MODEL_STATES))
    hosted = host_bytes(exact, 1)
    return f"{device} and {format_memory(hosted)} on the host" if hosted else device


def _tensor_reason(derivation: Derivation) -> str:
    cluster, ranks = derivation.spec.cluster, derivation.spec.degree(Axis.TP)
    size = 2 * reconstruction_unit(derivation.facts)
    layer = f"a layer has {format_memory(size)} in 16-bit precision"
    if ranks == 1:
        share = f", {size / cluster.device_memory:.1%} of the device memory" if cluster else ""
        return f"2. no tp: {layer}{share}, and the all-reduces of tp would be on the critical path"
    return (
        f"2. tp {ranks}: {layer}, sharded by {ranks}; {_sent(derivation, Axis.TP)} on the "
        f"critical path, {_where(derivation, Axis.TP, cluster)}{_waits(derivation, Axis.TP)}"
    )


def _stages_reason(derivation: Derivation) -> str:
    spec, ranks = derivation.spec, derivation.spec.degree(Axis.PP)
    if ranks == 1:
        nodes = _nodes(spec)
        over = f"the other axes span {nodes} nodes" if nodes > 1 else "one node is enough"
        return f"3. no pp: {over}, and there is no bubble"
    micro = spec.batch.accumulate
    return (
        f"3. pp {ranks}: {_sent(derivation, Axis.PP)} between stages, "
        f"{_where(derivation, Axis.PP, spec.cluster)}; {micro} micro-batches, "
        f"{micro / ranks:g} per stage{_waits(derivation, Axis.PP)}"
    )


def _context_reason(derivation: Derivation) -> Iterator[str]:
    """Why there are slices of the tokens; nothing without them."""
    spec, step = derivation.spec, derivation.plan.context
    if step is None:
        return
    yield (
        f"4. {step.axis} {spec.degree(step.axis)}, {attention_of(spec)}: each rank holds "
        f"{derivation.plan.tokens} of the {step.sequence} tokens of a sample; in attention "
        f"{_sent(derivation, step.axis, of_activations=True)}, "
        f"{_where(derivation, step.axis, spec.cluster)}{_waits(derivation, step.axis)}"
    )


def _sent(derivation: Derivation, *axes: Axis, of_activations: bool | None = None) -> str:
    """Return what is sent over some of the axes; of activations alone, or of all but these, where
    that is said."""
    names = {axis.value for axis in axes}
    sent = sum(
        row.sent_bytes
        for row in busiest(derivation.exact.traffic)
        if row.key.phase is not Phase.SETUP
        and {*row.key.axes} <= names
        and of_activations in (None, row.key.state is State.ACTIVATIONS)
    )
    return f"{format_bytes(sent)} sent per step"


def _cuts(factor: Factor) -> bool:
    """Whether an axis cuts some of the states."""
    placement = factor.placement
    return {placement.parameters, placement.optimizer, placement.gradients} != {R}


def _waits(derivation: Derivation, *axes: Axis, is_of_states: bool = False) -> str:
    """Return how much of a step waits for what moves over the axes; empty where no rates say it.
    What moves over axes of tokens alone is attention's more than that of states."""
    if (step := derivation.exact.step) is None:
        return ""
    names = {axis.value for axis in axes}
    waited = sum(
        seconds
        for over, seconds in step.exposed().items()
        if {*over} <= names and not (is_of_states and {*over} <= _OF_TOKENS)
    )
    return f"; exposed communication takes {waited / step.seconds:.1%} of the step"


def _where(derivation: Derivation, axis: Axis, cluster: Cluster | None) -> str:
    over = link(derivation.spec, derivation.exact.traffic, axis)
    if over is None or cluster is None:
        return "over links of unknown bandwidth"
    if over.nodes == 1:
        return f"within a node at {format_bytes(cluster.intra_node_bandwidth)}/s"
    return f"over {over.nodes} nodes at {format_bytes(cluster.inter_node_bandwidth)}/s"


def _nodes(spec: Spec) -> int:
    return -(-spec.world_size // spec.cluster.devices_per_node) if spec.cluster else 1


_BEST_TRACED = 6  # candidates that are derived exactly of a model that has to be traced
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
        count: How many candidates to predict exactly. Default: 100, or 6 for a model that must be
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
        rows = self._ordered((*rows, *(row for _, row, _ in lost if row and self._obeys(row))))
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
        derivation = derive(best, self._facts(best), self._timing(best))
        named = (
            Lost(name=name, best=row, why=why or reason(row, rows[0], self.objective))
            for name, row, why in lost
        )
        return replace(selection, lost=tuple(named), reasons=tuple(reasons(derivation)))

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

    def _of_kinds(
        self, result: SearchResult, ranked: Sequence[Ranked]
    ) -> Iterator[tuple[str, Ranked | None, str]]:
        """Well-known choices and what the paper's selection says by name, with the best of their
        kind, or why there is none."""
        base, devices = self.job.base, self.job.devices
        placed = [(next(row.candidates()).candidate.spec(base), row) for row in result.placements]
        for known in (*KNOWN, *recomputing(ranked[0].spec)):
            if (where := known.where(self.job)) is not None:
                row, why = self._like(placed, ranked, where, known.kept)
                if row is not None or not known.kept:
                    yield known.name, row, why
        assert base.cluster is not None, "a job that is searched for has a cluster"
        advised = algorithm1(requirements(own_facts(self.job.sized), base.cluster, devices))
        name = f"the paper's Algorithm 1: {advised.advice}"
        if not advised.degrees:
            yield name, None, "the search found one"
            return
        said = [f"mesh.{axis}={degree}" for axis, degree, _ in advised.degrees]
        said += [f"placement.{axis}={modes}" for axis, _, modes in advised.degrees]
        yield name, *self._like(placed, ranked, said)

    def _like(
        self,
        placed: Sequence[tuple[Spec, SearchedPlacement]],
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
        scored = [
            scored
            for row in alike
            for scored in row.candidates()
            if not kept or keeping(scored.candidate.kept) == kept
        ]
        most = self.search.task.room * SLACK
        may_fit = sorted((row for row in scored if row.peak <= most), key=self._key)
        rows = list(self._fitting(may_fit, _OF_KIND))
        rows += (row for row in ranked if obeys(row.spec))
        if rows:
            near = self._descended(min(rows, key=self._order), _WORK_OF_KIND)
            rows += (row for row in near if obeys(row.spec))
            return self._ordered(rows)[0], ""
        if self.cuts is not None:
            return None, "would need another trace; use a larger `--exact`"
        if not scored:
            return None, "none fits by the estimate"
        least = self.exactly(min(scored, key=attrgetter("peak")))
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
