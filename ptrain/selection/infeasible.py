"""Why a search has no candidate: constraints that exclude each other, degrees that nothing divides,
or what the rules say of those that were tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby, islice, product

from ptrain.algebra.legality import check, executed
from ptrain.axes.candidates import NOTHING, AxisChoice, chosen
from ptrain.axes.data.candidates import SPACE as DATA_SPACE
from ptrain.derivation.layers import is_tabulated
from ptrain.errors import Fault
from ptrain.selection.quantities import Aspect
from ptrain.selection.search import Search
from ptrain.selection.space import (
    Candidate,
    batched,
    data_choices,
    inner_products,
    micro_batches,
    pipelines,
    ways_to_keep,
)
from ptrain.selection.task import SearchTask
from ptrain.selection.where import Constraint, Where
from ptrain.spec.activations import Kept
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec

_TRIED, _PER_FLOW = 200, 2  # specs that the rules are asked about, and data choices of a flow
_UNKNOWN = Fault(
    place="activations",
    finding="no memory table covers these blocks on these devices",
    remedy=(
        "Use another loss, attention or model, or predict single placements with `ptrain predict`."
    ),
)


def why_none(search: Search) -> tuple[str, str]:
    """Return finding and remedy of a search that has no candidate under its constraints."""
    task = search.task
    rules = tuple(task.where.constraints)
    on = f"on {task.devices} devices"
    if rules and search.has(Where()):
        reasons = list(_reasons(task, Where(rules)))
        why = f": {reasons[0][0]}" if reasons else ""
        finding = f"no legal placement {on} satisfies {_texts(rules)}{why}"
        return finding, _remedy(rules, search.has)
    reasons = list(_reasons(task, Where(rules)))
    finding, remedy = (
        reasons[0] if reasons else ("no degrees divide the devices", ("Use another `--devices`."))
    )
    return f"no combination {on} is legal: {finding}", remedy


def _remedy(rules: Sequence[Constraint], has: Callable[[Where], bool]) -> str:
    """What to do without: constraints that alone have nothing, or those without each of which the
    others have something."""
    alone = [rule for rule in rules if not has(Where((rule,)))]
    needless = (r for r in rules if has(Where(tuple(other for other in rules if other != r))))
    return " Or: ".join(rule.remedy for rule in alone or needless) or "Remove one of them."


def _texts(rules: Sequence[Constraint]) -> str:
    return ", ".join(rule.text for rule in rules)


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
    finding = next(_reasons(task.without_written(), Where(rules)), ("", ""))[0]
    return f"none is legal: {finding}" if finding else "none is legal"


def _reasons(task: SearchTask, where: Where) -> Iterator[tuple[str, str]]:
    """Findings with their remedies, the most common first; where no degrees are left to be tried,
    which degrees there are."""
    faults = Counter(islice(_faults(task, where), _TRIED))
    yield from ((fault.finding, fault.remedy) for fault, _ in faults.most_common())
    if not faults:
        yield from _untried(task, where)
        yield from _degrees(task, where)


def _untried(task: SearchTask, where: Where) -> Iterator[tuple[str, str]]:
    """Constraints that no choice of their room obeys, whatever the others are."""
    base, written = task.placed, task.written
    staged = pipelines(base, task.devices, written)
    choices = {
        Aspect.DATA: [c for some in data_choices(base, written).values() for c in some],
        Aspect.PIPELINE: [choice for _, some in staged for choice in some],
    }
    for rule in where.constraints:
        tried = choices.get(rule.part, [])
        if tried and not any(rule.holds(chosen(base, (choice,))) for choice in tried):
            yield f"{rule.text} is outside the search space", rule.remedy


def _faults(task: SearchTask, where: Where) -> Iterator[Fault]:
    """What the rules say of some candidates that obey constraints: of each the first fault."""
    base, written = task.placed, task.written
    data = cache(lambda ranks: _data(task, ranks, where))
    for ranks, within in inner_products(base, task.devices, written):
        if not where.admits(Aspect.WITHIN, chosen(base, within)):
            continue
        for left, choices in pipelines(base, task.devices // ranks, written):
            flows = [c for c in choices if where.admits(Aspect.PIPELINE, chosen(base, (c,)))]
            if not flows:
                continue
            samples = left * chosen(base, within).data_degree
            batches = [
                (micro, number)
                for micro, number in micro_batches(base, samples)
                if where.admits(Aspect.BATCH, batched(base, micro, number))
            ]
            if not batches:
                yield _indivisible(base, samples)
                continue
            for parts in product(flows, data(left), written.kept or ways_to_keep(written.away)):
                yield from _first_fault(task, within, batches[0][0], *parts)


def _indivisible(base: Spec, data_ranks: int) -> Fault:
    """Why a rank has no micro-batch."""
    samples, left = divmod(base.batch.global_samples, data_ranks)
    if left or not samples:
        return Fault(
            place="batch.global",
            finding=(
                f"a step's {base.batch.global_samples} samples are not divisible by "
                f"{data_ranks} data-parallel ranks"
            ),
            remedy=f"Use `batch.global={max(1, samples) * data_ranks}`.",
        )
    known = ", ".join(str(micro) for micro, _ in micro_batches(base, data_ranks))
    return Fault(
        place="batch.micro",
        finding=(
            f"with {data_ranks} data-parallel ranks, each rank has {samples} samples per "
            f"step; possible micro-batches are {known}"
        ),
        remedy="Use `batch.micro=auto`, or one of these values.",
    )


def _data(task: SearchTask, ranks: int, where: Where) -> list[AxisChoice]:
    """Some choices of the data axes that obey constraints: what degrees say is asked once."""
    base = task.placed
    by_degrees = groupby(
        DATA_SPACE.choices(base, ranks, task.written),
        key=lambda choice: tuple((factor.axis, factor.degree) for factor in choice.factors),
    )
    return [
        choice
        for _, choices in by_degrees
        if where.admits(Aspect.RANKS, chosen(base, ((first := next(choices)),)))
        for choice in islice(
            (c for c in (first, *choices) if where.admits(Aspect.DATA, chosen(base, (c,)))),
            _PER_FLOW,
        )
    ][:_PER_FLOW]


def _first_fault(
    task: SearchTask,
    within: tuple[AxisChoice, ...],
    micro: int,
    flow: AxisChoice,
    data: AxisChoice,
    kept: Kept,
) -> Iterator[Fault]:
    candidate = Candidate(within=within, pipeline=flow, data=data, micro=micro, kept=kept)
    spec = candidate.spec(task.placed)
    faults = (*check(spec), *executed(spec))
    if faults:
        yield faults[0]
    elif task.own is None and not is_tabulated(spec):
        yield _UNKNOWN


def _degrees(task: SearchTask, where: Where) -> Iterator[tuple[str, str]]:
    """The degrees of tp and pp that there are: of the axis of which constraints ask for another, or
    of both."""
    base, shape = task.base, task.base.model
    assert isinstance(shape, ModelShape), "a built-in model"
    inner = {chosen(base, c).degree(Axis.TP) for _, c in inner_products(base, task.devices)}
    staged = pipelines(base, task.devices, task.written)
    stages = {task.devices // left for left, choices in staged if choices}
    node = base.cluster.devices_per_node if base.cluster else task.devices
    heads = f"{shape.heads} heads, {shape.kv_heads} KV heads, ffn {shape.ffn}"
    said = (
        (
            Axis.TP,
            inner,
            (f"it must divide {heads} and the number of devices, and fit within a node of {node}"),
        ),
        (
            Axis.PP,
            stages,
            (f"it must divide the number of devices, and its stages share {shape.layers} layers"),
        ),
    )
    sentences = []
    for axis, degrees, why in said:
        rules = [rule for rule in where.constraints if rule.name == f"mesh.{axis}"]
        known = " or ".join(map(str, sorted(degrees)))
        sentences.append(f"{axis} can be {known} ({why})")
        if rules and not any(all(rule.holds_of(d) for rule in rules) for d in degrees):
            yield sentences[-1], f"Use `{axis}={max(degrees)}`."
            return
    yield " and ".join(sentences), "Use another `--devices`, or `auto` for more mesh axes."
