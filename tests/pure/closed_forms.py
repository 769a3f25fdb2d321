"""Both opinions on a step of the data axes, in one vocabulary: the closed forms, and the life of
the same plan on a model without activations. And the settings in which they are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random

from ptrain.cost import State, Traffic
from ptrain.derivation.flat import joined_units
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.facts.model import ModelFacts, passes_of
from ptrain.plan.lower import lower
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, ReduceScatterVia, Reshard, SyncPolicy
from ptrain.spec.placement import Axis, Placement, Tier
from ptrain.spec.precision import LAYOUTS, DType, Layout
from ptrain.spec.spec import Spec, indices_in_groups, ranks_over
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard
from ptrain.timeline import Boundary, Complete, Item, Mark, Run, Timeline
from tests.oracles.data.chain import ChainUnit, UnitChain
from tests.oracles.data.wrap import closed_form
from tests.oracles.data.wrap import step_traffic as sent_in_closed_form
from tests.pure.build import BY_HAND, make_facts, make_spec, tuple_of
from tests.pure.replayed_steps import flight, resident, traffic_of_ranks, transient

SHARD, REPLICATE, CONTEXT = Axis.DP_SHARD, Axis.DP_REPLICATE, Axis.CP
EXPERTS = Axis.EP
STORED = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
HEAD = -1  # of the root's tensors the last: its gradient comes first
Mesh = dict[Axis, tuple[int, Placement]]
Setting = tuple[Spec, Plan]
Figures = dict[str, object]  # by name

# Of each model another unit dominates: equal blocks, the first, the last, the root, a block alone.
# No number of ranks divides the features of a tensor with one row: along these it would be sharded,
# and copied once more, for which there is no closed form.
MODELS = {
    name: make_facts(*shapes)
    for name, shapes in {
        "equal": (((5, 3), (2,)), ((5, 3), (2,)), ((1, 7), (7, 2))),
        "first": (((40, 6), (9,)), ((5, 3), (2,)), ((7, 2),), ((1, 7), (3,))),
        "last": (((5, 3), (2,)), ((7, 2),), ((9,), (40, 6)), ((1, 7), (3,))),
        "root": (((5, 3), (2,)), ((5, 3), (2,)), ((41, 6), (3,), (30, 6))),
        "alone": (((11, 5), (3,)), ()),
    }.items()
}


def with_experts(facts: ModelFacts) -> ModelFacts:
    """The same model whose first unit, and every other one behind it but the root, is a layer's
    experts: what a rank has of them."""
    *blocks, root = facts.units
    apart = (
        replace(unit, modules=tuple(f"{name}.experts" for name in unit.modules))
        if place % 2 == 0
        else unit
        for place, unit in enumerate(blocks)
    )
    return replace(facts, units=(*apart, root))


def empty_timeline(facts: ModelFacts, itemsize: int, *, is_fresh: bool) -> Timeline:
    """A micro-batch that allocates nothing but, if `is_fresh`, each gradient just before it is
    complete: the boundaries of blocks within the root's."""
    root, blocks = len(facts.units) - 1, range(len(facts.units) - 1)
    forward = [Boundary(Mark.ENTER, root)]
    for unit in blocks:
        forward += [Boundary(Mark.ENTER, unit), Boundary(Mark.LEAVE, unit)]
    forward.append(Boundary(Mark.LEAVE, root))

    def complete(unit: int, of: slice) -> Iterator[Item]:
        for tensor in reversed(facts.units[unit].tensors[of]):
            size = tensor.numel * itemsize
            if is_fresh:
                yield Run(size, size)
            yield Complete(tensor.name, size, cloned=not is_fresh)

    backward: list[Item] = [Boundary(Mark.PRE_BACKWARD, root), *complete(root, slice(HEAD, None))]
    for unit in reversed(blocks):
        backward.append(Boundary(Mark.PRE_BACKWARD, unit))
        backward += [*complete(unit, slice(None)), Boundary(Mark.POST_BACKWARD, unit)]
    backward += [*complete(root, slice(HEAD)), Boundary(Mark.POST_BACKWARD, root)]
    return Timeline(forward=tuple(forward), backward=tuple(backward))


def with_seed_bytes(timeline: Timeline) -> Timeline:
    """With the 4 bytes that a trace's backward pass begins with. Of a scaled loss the life takes
    them off, since it begins with the scale; the closed forms know neither."""
    size = DType.FP32.itemsize
    return timeline._replace(backward=(Run(size, size), *timeline.backward, Run(0, -size)))


def chain_of(plan: Plan, facts: ModelFacts, *, is_fresh: bool) -> UnitChain:
    units = joined_units(plan, facts.units) if isinstance(plan.wrap, FlatUnits) else facts.units
    *blocks, root = (
        ChainUnit(unit.shapes, unit.modules[-1] == "", plan.is_apart(unit.modules))
        for unit in units
    )
    numel = {tensor.name: tensor.numel for tensor in facts.tensors}
    return UnitChain(
        blocks=tuple(blocks),
        root=root,
        head=frozenset({len(root.shapes) + HEAD} if root.shapes else ()),
        arrival=tuple(numel[name] for name in facts.gradient_order),
        is_fresh=is_fresh,
    )


def traffic(rows: Sequence[Traffic]) -> dict[str, tuple[int, int, int]]:
    """Calls, payload and sent bytes by what, over what, of what and when."""
    return {
        " ".join(map(str, (row.key.collective, row.key.via, row.key.axes, row.key.state,
                           row.key.phase))): (row.calls, row.payload_bytes, row.sent_bytes)
        for row in rows
    }  # fmt: skip


def in_closed_form(
    spec: Spec, plan: Plan, facts: ModelFacts, *, is_fresh: bool
) -> dict[str, object]:
    """Every figure of the closed forms, by name; of each rank's place along the axes on which
    ranks differ."""
    chain = chain_of(plan, facts, is_fresh=is_fresh)
    form = closed_form(spec, plan, chain)
    figures: Figures = {"transient": form.transient()}
    for index in sorted({*indices_in_groups(spec, plan.differing_axes)}):
        stored = form.resident(index)
        for state in STORED:
            for tier in Tier:
                figures[f"{state}@{tier} {index}"] = stored[state][tier]
        for phase, size in form.peaks(index).items():
            figures[f"peak {phase} {index}"] = size
    return figures | traffic(sent_in_closed_form(spec, plan, chain))


def by_life(spec: Spec, plan: Plan, facts: ModelFacts, *, is_fresh: bool) -> Figures:
    """The same figures, as the derivation has them."""
    itemsize = plan.update.layout.parameters.itemsize
    timeline = empty_timeline(facts, itemsize, is_fresh=is_fresh)
    if plan.update.layout.scales_loss and plan.update.layout.parameters is not DType.FP64:
        timeline = with_seed_bytes(timeline)
    rows = resident(spec, plan, facts)
    passes = passes_of(timeline, None, is_first=True, output=0, hidden=0)
    places = (passes,) * ranks_over(spec, plan.cutting_axes)
    traced = replace(facts, timeline=timeline, stage_passes=(places,))
    step = flight(spec, traced, plan=plan)
    figures: Figures = {"transient": transient(step)}
    index_of = indices_in_groups(spec, plan.differing_axes)
    always = dict.fromkeys(index_of, 0)
    for row in rows:
        index = index_of[row.rank]
        if row.rank != index_of.index(index):
            continue
        if row.state is not State.GRADIENTS:
            always[index] += row.device_bytes
        if row.state in STORED:
            sizes = (row.device_bytes, row.host_bytes, row.file_bytes)
            for tier, size in zip(Tier, sizes, strict=True):
                figures[f"{row.state}@{tier} {index}"] = size
    for peak in step.peaks:
        index = index_of[peak.rank]
        figures[f"peak {peak.phase} {index}"] = peak.device_bytes - always[index]
    return figures | traffic(traffic_of_ranks(make_wrapping(spec, plan, facts)))


def differences(spec: Spec, plan: Plan, facts: ModelFacts, *, is_fresh: bool) -> list[str]:
    """Return the figures that differ."""
    formulas = in_closed_form(spec, plan, facts, is_fresh=is_fresh)
    life = by_life(spec, plan, facts, is_fresh=is_fresh)
    return [
        f"{name}: the life has {life.get(name)}, the closed form {formulas.get(name)}"
        for name in sorted({*formulas, *life})
        if formulas.get(name) != life.get(name)
    ]


# ---- the settings


def meshes() -> Iterator[Mesh]:
    """One axis with any modes and tiers; and replicas around shards, in all modes of each."""
    theta, omega = ("R", "S*", "S*@host", "M"), ("R", "S", "S*", "S@host", "S@file")
    gradients = ("R", "S", "S*", "S@host", "S@file", "R@host", "M")
    for modes in itertools.product(theta, omega, gradients):
        yield {SHARD: (2, tuple_of(",".join(modes)))}
    inner = itertools.product(("R", "S*"), ("R", "S"), ("R", "S"))
    outer = itertools.product(("R", "S*"), ("R", "S", "S*"), ("R", "S", "S*"))
    for around, within in itertools.product(outer, [*inner]):
        yield {
            REPLICATE: (2, tuple_of(",".join(around))),
            SHARD: (2, tuple_of(",".join(within))),
        }


def lower_with_options(spec: Spec, facts: ModelFacts, **dials: object) -> Setting | None:
    """The spec and its plan with other dials of its wrap; None where there is no such plan: Theta
    made of master copies that there are none of, gradients used up that are to be accumulated or
    looked through for one that overflowed."""
    layout = spec.precision.layout
    plan = lower(spec, facts)
    wrap = plan.wrap
    if isinstance(wrap, FlatUnits):
        if wrap.materialized and layout.master is None:
            return None
        if wrap.consumed and (layout.scales_loss or plan.accumulate.micro_batches > 1):
            return None
    known = {name: value for name, value in dials.items() if hasattr(wrap, name)}
    return spec, plan.replace_steps(replace(wrap, **known))


Choice = tuple[Mesh, Layout, ReduceScatterVia, bool, int]


@cache
def choices() -> tuple[Choice, ...]:
    """Modes x meshes x layouts x reduce-scatter x overlap x micro-batches."""
    dials = itertools.product(LAYOUTS.values(), ReduceScatterVia, (False, True), (1, 3))
    return tuple((mesh, *dial) for mesh, dial in itertools.product([*meshes()], [*dials]))


def plain_setting(choice: Choice, facts: ModelFacts) -> Setting | None:
    """A choice as a spec and its plan; None where they make none."""
    mesh, layout, via, overlaps, count = choice
    spec = make_spec(
        mesh,
        clip=None,
        model=BY_HAND,
        layout=layout,
        reduce_scatter=via,
        accumulate=count,
    )
    return lower_with_options(spec, facts, overlaps=overlaps)


Modes = dict[Axis, tuple[str, str, str]]  # of Theta, Omega and G
MESHES = ((SHARD,), (REPLICATE,), (REPLICATE, SHARD))  # the axes of two ranks or more
# With an axis that gives ranks experts of their own, which are fewer axes' units.
OVER_EXPERTS = ((EXPERTS,), *((*axes, EXPERTS) for axes in MESHES))
# The same with an axis inside them along which gradients are summed too.
OVER_TOKENS = ((CONTEXT,), *((*axes, CONTEXT) for axes in MESHES))


def drawn_setting(
    draw: Random, facts: ModelFacts, meshes: Sequence[tuple[Axis, ...]] = MESHES
) -> Setting | None:
    """Any modes, degrees, layout, optimizer and dials; None where they make no plan."""
    theta = ("R", "S*", "S*@host", "S*@file", "R@host", "M")
    omega: tuple[str, ...] = ("R", "S*", "S*@host", "R@host")
    gradients: tuple[str, ...] = ("R", "S*", "S*@file", "R@host", "M")
    optimizer = draw.choice(("adamw", "sgd", "muon"))
    if optimizer != "muon":
        omega, gradients = (*omega, "S", "S@host", "S@file"), (*gradients, "S", "S@host")
    modes: Modes = {
        axis: (draw.choice(theta), draw.choice(omega), draw.choice(gradients))
        for axis in draw.choice((*meshes, meshes[-1]))
    }
    if draw.random() < 0.1:
        modes = dict.fromkeys(modes, ("R", draw.choice(omega), "R"))
    layouts = (
        *LAYOUTS.values(),
        replace(LAYOUTS["fp32"], reduced=DType.BF16),
        replace(LAYOUTS["fp32"], moments=DType.BF16),
        replace(LAYOUTS["zero16"], moments=DType.BF16),
    )
    return _with_dials(draw, facts, modes, optimizer, draw.choice(layouts))


def drawn_fully_sharded(
    draw: Random, facts: ModelFacts, meshes: Sequence[tuple[Axis, ...]] = MESHES
) -> Setting | None:
    """FSDP2 on shards of Theta or of master copies that are cast, with replicas or without."""
    axes, theta = draw.choice(meshes), draw.choice(("S*", "M"))
    modes: Modes = dict.fromkeys(axes, (theta, "S", "S"))
    if len(axes) > 1 and REPLICATE in axes:
        modes[REPLICATE] = "R", "R", "R"
    fit = [
        layout
        for layout in LAYOUTS.values()
        if (layout.gradients is layout.master and not layout.keeps_both) is (theta == "M")
        and (theta == "M" or layout.is_plain)
    ]
    optimizer = draw.choice(("adamw", "sgd"))
    return _with_dials(draw, facts, modes, optimizer, draw.choice(fit))


def _with_dials(
    draw: Random, facts: ModelFacts, modes: Modes, optimizer: str, layout: Layout
) -> Setting | None:
    clip = draw.choice((None, 1.0))
    count = draw.choice((1, 2, 3, 5))
    spec = make_spec(
        {
            axis: (draw.choice((2, 3, 4)), tuple_of(",".join(parts)))
            for axis, parts in modes.items()
        },
        clip=clip,
        model=BY_HAND,
        layout=layout,
        compute_fp64=draw.random() < 0.1,
        optimizer=optimizer,
        momentum=draw.choice((0.0, 0.9)),
        reduce_scatter=draw.choice((*ReduceScatterVia,)),
        accumulate=count,
        bucket_bytes=draw.choice((25 * 2**20, 64, 1000)),
    )
    plan = lower(spec, facts)
    dials: dict[str, object] = {"overlaps": draw.random() < 0.5}
    forwards: list[bool | int | Reshard] = [True, False, Reshard.NON_ROOT]
    if isinstance(plan.wrap, FullyShard):
        forwards += [2] * (spec.degree(plan.wrap.shard_axes[-1]) == 4)
    sync = SyncPolicy(
        gradients=draw.choice((*GradientSync,)),
        reshard_after_forward=draw.choice(forwards),
        reshard_after_backward=draw.random() < 0.5,
    )
    if isinstance(plan.wrap, FlatUnits):
        dials |= _dials_of_flat_units(draw, plan, sync)
    elif isinstance(plan.wrap, FullyShard):
        dials |= {"sync": sync, "prefetch": draw.choice((None, 0, 1, 2))}
    return lower_with_options(spec, facts, **dials)


def _dials_of_flat_units(draw: Random, plan: Plan, sync: SyncPolicy) -> dict[str, object]:
    """Those that such a plan obeys: a whole gradient is reduced last, a layout's two sums are kept
    alike, and what comes from another tier must be whole there."""
    wrap = plan.wrap
    assert isinstance(wrap, FlatUnits)
    if not wrap.gradients:
        sync = replace(sync, gradients=GradientSync.LAST)
    elif plan.update.layout.keeps_both:
        sync = replace(sync, gradients=GradientSync.EVERY)
    after = draw.choice((*GatherAfterUpdate,))
    if wrap.parameters_tier is not Tier.DEVICE and after is GatherAfterUpdate.NEXT_FORWARD:
        after = GatherAfterUpdate.BLOCKING
    streamed = draw.random() < 0.5
    return {
        "sync": sync,
        "prefetch": draw.choice((0, 0, 1, 2, 9)),
        "gather_after_update": after,
        "update_tier": Tier.DEVICE if streamed else wrap.update_tier,
    }
