"""The tables about pipelines, all of them worked out and nothing run: what each schedule
waits and holds, what each order of the mesh costs, and what `sync` costs beside pp."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from _script import table

from ptrain.algebra.legality import require_runnable
from ptrain.axes.pipeline.catalogue import SCHEDULES, make_schedule
from ptrain.axes.pipeline.cost import ClosedForm, Relation
from ptrain.axes.pipeline.schedule import PipelineShape, StageCost
from ptrain.axes.pipeline.simulate import simulate
from ptrain.axes.pipeline.stage_facts import count_in_flight, list_transfers
from ptrain.cost import Collective, Traffic, busiest
from ptrain.derivation.estimate import derive
from ptrain.derivation.interconnect import axis_link
from ptrain.plan.composition import are_consecutive, theorem_7
from ptrain.report.table import memory_text, traffic_text
from ptrain.spec.load import load
from ptrain.spec.pipeline import PipelineSpec, ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, rank_groups

SIZES = ((4, 8), (8, 32))  # ranks, micro-batches
UNIT = StageCost()  # a forward as long as either half of a backward
_SIGNS = {Relation.EQUAL: "=", Relation.AT_LEAST: "≥", Relation.AT_MOST: "≤"}

LARGE = "70b-3d"
# Four replicas of a stage and tp fill a node of 8; then four stages and tp do.
MESHES = (
    "{pp: 16, dp_shard: 4, tp: 2}",
    "{dp_shard: 4, pp: 16, tp: 2}",
    "{pp: 4, dp_shard: 16, tp: 2}",
    "{dp_shard: 16, pp: 4, tp: 2}",
)
DEEP = "model.layers=16"  # of two blocks a stage, what is gathered ahead is all of them
POLICIES = (
    "",
    "{gradients: last}",
    "{reshard_after_forward: true, reshard_after_backward: true}",
    "{reshard_after_forward: true, reshard_after_backward: true, gradients: last}",
)


def schedules() -> str:
    """Of each schedule: stages, what it holds and sends, what it waits at two sizes and by the
    literature's formula at the first."""
    waits = [f"{ranks} ranks, {times} micro-batches" for ranks, times in SIZES]
    columns = ["spec", "stages per rank", "in flight", "sends", *waits, "published"]
    return table(columns, (_schedule_row(name) for name in ScheduleName))


def _schedule_row(name: ScheduleName) -> Sequence[str]:
    sizes = [_pipeline(name, ranks, times) for ranks, times in SIZES]
    made = [simulate(make_schedule(name, size)) for size in sizes]
    form = SCHEDULES[name].cost.bubble(sizes[0], UNIT, 0)
    first = make_schedule(name, sizes[0])
    most = [
        max(sum(counts.values()) for counts in count_in_flight(first, rank))
        / sizes[0].stages_per_rank
        for rank in (0, first.ranks - 1)
    ]
    sent = max(
        sum(
            e.calls
            for e in list_transfers(first)
            if (e.rank, e.collective) == (rank, Collective.SEND)
        )
        for rank in range(first.ranks)
    )
    return (
        f"`pp-{name}`",
        str(sizes[0].stages_per_rank),
        f"{most[0]:g} … {most[1]:g}",
        f"{sent / first.microbatches:g}",
        *(f"{each.bubble_fraction:.1%} · {each.bubble_ratio:.1%}" for each in made),
        _formula(form),
    )


def _formula(form: ClosedForm | None) -> str:
    return f"{_SIGNS[form.relation]} {form.ratio:.1%}" if form else "none known"


def _pipeline(name: ScheduleName, ranks: int, microbatches: int) -> PipelineShape:
    stages = PipelineSpec(schedule=name).stages_over(ranks)
    return PipelineShape(ranks=ranks, stages_per_rank=stages // ranks, microbatches=microbatches)


def orders() -> str:
    """A large mesh in both orders, twice: whose groups leave their node, and what that takes."""
    axes = (Axis.DP_SHARD, Axis.PP)
    columns = ["mesh, outermost first", "order of", "replicas of a stage", *axes]

    def rows() -> Iterator[Sequence[str]]:
        for mesh in MESHES:
            spec = require_runnable(load(LARGE, [f"mesh={mesh}"]))
            derivation = derive(spec)
            condition, *_ = theorem_7(spec, derivation.plan)
            others = tuple(f.axis for f in spec.factors if f.axis is not Axis.PP)
            placed = "adjacent" if are_consecutive(rank_groups(spec, others)) else "apart"
            order = condition.name.partition(".")[0]
            traffic = derivation.exact.traffic
            yield (f"`{mesh}`", order, placed, *(_carried(spec, traffic, axis) for axis in axes))

    return table(columns, rows())


def _carried(spec: Spec, traffic: Sequence[Traffic], axis: Axis) -> str:
    found = axis_link(spec, traffic, axis)
    assert found is not None, "a spec with a cluster and this axis"
    where = f"over {found.nodes} nodes" if found.nodes > 1 else "in one node"
    seconds = found.latency_seconds + found.transfer_seconds
    return f"{traffic_text(found.sent_bytes)} {where}, {seconds:.3g} s"


def policies() -> str:
    """What `sync` costs a stage that gathers its units and reduces its gradients to slices."""
    columns = ["`sync`", "gathers per unit", "reductions per unit", "sent per step", "peak"]

    def rows() -> Iterator[Sequence[str]]:
        for written in POLICIES:
            sync = [f"sync={written}"] if written else []
            spec = require_runnable(load("pp-zero3", [DEEP, *sync]))
            derivation = derive(spec)
            plan, exact = derivation.plan, derivation.exact
            assert plan.pipeline is not None
            units = len(plan.pipeline.layers[0]) + 1  # blocks, and what the stage has beside them
            calls = Counter[Collective]()
            for row in busiest(exact.traffic):
                calls[row.key.collective] += row.calls
            peak = max((row.device_bytes for row in exact.peak), default=None)
            yield (
                f"`{written}`" if written else "default",
                f"{calls[Collective.ALL_GATHER] / units:g}",
                f"{calls[Collective.REDUCE_SCATTER] / units:g}",
                traffic_text(exact.sent_bytes()),
                memory_text(peak),
            )

    return table(columns, rows())


TABLES = {"schedules": schedules, "orders": orders, "policies": policies}
