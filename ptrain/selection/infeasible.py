"""Why a search has no candidate: constraints that nothing obeys or that exclude each other, or what
the rules say of those that were tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, product

from ptrain.algebra.legality import check, executed
from ptrain.axes.candidates import NOTHING, chosen, divisors
from ptrain.errors import Fault
from ptrain.selection.quantities import QUANTITIES, Aspect, Value
from ptrain.selection.search import Search
from ptrain.selection.space import (
    Candidate,
    apart,
    batched,
    data_choices,
    degrees_over,
    inner_products,
    micro_batches,
    pipelines,
    sized,
    ways_to_keep,
)
from ptrain.selection.task import SearchTask
from ptrain.selection.where import Constraint, Where
from ptrain.spec.spec import Spec

_TRIED, _PER_FLOW = 200, 2  # specs that the rules are asked about, and data choices of a flow
_UNKNOWN = Fault(
    place="activations",
    finding="no degrees divide the devices, or no memory table covers these blocks",
    remedy=(
        "Use another `--devices`, loss, attention or model, or predict single placements with "
        "`ptrain predict`."
    ),
)


def why_none(search: Search) -> tuple[str, str]:
    """Return finding and remedy of a search that has no candidate under its constraints."""
    task = search.task
    rules = tuple(task.where.constraints)
    on = f"on {task.devices} devices"
    if rules and search.has(Where()):
        alone = [rule for rule in rules if not search.has(Where((rule,)))]
        needless = (rule for rule in rules if search.has(_without(rules, rule)))
        remedy = " Or: ".join(rule.remedy for rule in alone or needless)
        finding = f"no legal placement {on} satisfies {', '.join(rule.text for rule in rules)}"
        offered = _offered(search, alone[0]) if alone else ""
        return f"{finding}{offered}", remedy or "Remove one of them."
    fault = _common_fault(task, task.where) or _common_fault(task, Where()) or _UNKNOWN
    return f"no combination {on} is legal: {fault.finding}", fault.remedy


def _without(rules: tuple[Constraint, ...], rule: Constraint) -> Where:
    return Where(tuple(other for other in rules if other != rule))


def why_not(search: Search, rules: tuple[Constraint, ...], others: Where) -> str:
    """Return why a search for what obeys these rules beside the others, the last one that was run,
    has scored nothing, in a few words."""
    task = search.task
    if others.constraints and search.has(Where(rules)):
        blame = [o.text for o in others.constraints if not search.has(Where((o, *rules)))]
        texts = blame or [other.text for other in others.constraints]
        return f"excluded by {', '.join(texts)}"
    if task.written != NOTHING and Search(task.without_written()).has(Where(rules)):
        return "excluded by values in the spec"
    fault = _common_fault(task.without_written(), Where(rules))
    return f"none is legal: {fault.finding}" if fault else "none is legal"


def _offered(search: Search, rule: Constraint) -> str:
    """Return which values of a constraint's quantity the search has candidates for, whatever else
    is chosen; "" where there is none that a constraint can name."""
    quantity = QUANTITIES[rule.name]
    values: Iterable[Value] = quantity.words or dict.fromkeys(
        quantity.of(spec) for spec in _choices(search.task, rule.part)
    )
    there = [
        f"[{value}]" if quantity.is_placement else str(value)
        for value in (sorted(values, key=float) if quantity.has_order else values)
        if value != "" and search.has(Where((replace(rule, compare="=", bound=value),)))
    ]
    return f": {rule.name} can be {', '.join(there)}" if there else ""


def _choices(task: SearchTask, part: Aspect) -> Iterator[Spec]:
    """Yield the base with each choice of a part that has numbers or tuples: at least with those
    that candidates have."""
    base, written, devices = task.placed, task.written, task.devices
    match part:
        case Aspect.WITHIN:
            yield from (chosen(base, some) for _, some in inner_products(base, devices, written))
        case Aspect.PIPELINE:
            staged = pipelines(base, devices, written)
            yield from (chosen(base, (choice,)) for _, some in staged for choice in some)
        case Aspect.BATCH:
            for ranks in divisors(devices):
                yield from (batched(base, *batch) for batch in apart(micro_batches(base, ranks)))
        case Aspect.RANKS:
            ways = [(len(axes), some[0]) for axes, some in data_choices(base, written).items()]
            for ranks, (axes, choice) in product(divisors(devices), ways):
                for degrees in degrees_over(axes, ranks):
                    yield chosen(base, (sized(choice, degrees),))
        case Aspect.DATA:
            kinds = data_choices(base, written).values()
            yield from (chosen(base, (choice,)) for some in kinds for choice in some)


def _common_fault(task: SearchTask, where: Where) -> Fault | None:
    """Return the most common fault of some candidates that obey constraints."""
    faults = Counter(islice(_faults(task, where), _TRIED)).most_common(1)
    return faults[0][0] if faults else None


def _faults(task: SearchTask, where: Where) -> Iterator[Fault]:
    """Yield the first fault of each of some candidates that obey constraints."""
    base, written = task.placed, task.written
    ways = {
        axes: [c for c in some if where.admits(Aspect.DATA, chosen(base, (c,)))][:_PER_FLOW]
        for axes, some in data_choices(base, written).items()
    }
    for ranks, within in inner_products(base, task.devices, written):
        cut = chosen(base, within)
        for left, choices in pipelines(base, task.devices // ranks, written):
            flows = [c for c in choices if where.admits(Aspect.PIPELINE, chosen(base, (c,)))]
            if not flows or not where.admits(Aspect.WITHIN, cut):
                continue
            batches = list(micro_batches(base, left * cut.data_degree))
            sizes = [m for m, n in batches if where.admits(Aspect.BATCH, batched(base, m, n))]
            if not batches:
                yield _indivisible(base, left * cut.data_degree)
            if not sizes:
                continue
            data = (
                sized(choice, degrees)
                for axes, some in ways.items()
                for degrees in (degrees_over(len(axes), left) if some else ())
                if where.admits(Aspect.RANKS, chosen(base, (sized(some[0], degrees),)))
                for choice in some
            )
            kept = written.kept or ways_to_keep(written.away)
            for flow, choice, way in product(flows, islice(data, _PER_FLOW), kept):
                tried = Candidate(
                    within=within, pipeline=flow, data=choice, micro=sizes[0], kept=way
                )
                spec = tried.spec(base)
                yield from (*check(spec), *executed(spec))[:1]


def _indivisible(base: Spec, data_ranks: int) -> Fault:
    """Return why a rank has no micro-batch."""
    samples = base.batch.global_samples
    return Fault(
        place="batch.global",
        finding=f"a step's {samples} samples are not divisible by {data_ranks} data-parallel ranks",
        remedy=f"Use `batch.global={max(1, samples // data_ranks) * data_ranks}`.",
    )
