"""Theorems 1 and 2 as printed: the `paper` column.

|X| is the layout's bytes per parameter times the number of parameters. s_unit (Definition 3, one
layer) is counted as `transient`, so that the sum of the states equals the printed figure. Nothing
is corrected: additional traffic of a real rank is in the `exact` column.

Placements are multiplied as in Definition 5, by a fold over the factors of a mesh. For each state,
a factor describes how one axis shards, replicates or moves the shares of the inner axes. Products
form a monoid: an axis of degree 1 is the identity, and the product is associative.

`notes` explain differences between the columns `exact` and `paper`: a sentence for each effect that
no theorem covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import attrgetter
from typing import NamedTuple, assert_never

from ptrain.axes.context.attention import left_to_others
from ptrain.axes.data.cost import count_reductions
from ptrain.axes.data.form import frozen_factors, places_frozen
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.axes.pipeline.stage_facts import stage_gathers
from ptrain.axes.ring import Calls, Group
from ptrain.axes.tensor.cost import cut_dims
from ptrain.by_rank import ByRank
from ptrain.cost import (
    PLACED,
    Collective,
    Column,
    Estimate,
    Footprint,
    Phase,
    State,
    Traffic,
    add_traffic,
)
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.facts.stages import Stage, is_within
from ptrain.optimizers.groups import rules_of_unit, uniform_rule
from ptrain.optimizers.update import moment_shapes, moments_per_element, optimizer_itemsize
from ptrain.spec.dials import GradientSync
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.placement import (
    DATA_AXES,
    OFFLOADED,
    S_STAR,
    TIER_DISTANCE,
    Axis,
    Distribution,
    Factor,
    M,
    Mode,
    R,
    S,
    Tier,
)
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.units import ceil_div, format_bytes

MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)

_NO_ACTIVATIONS = "the theorems take |A| as given, and the paper derives no value for it"
_NO_PEAK = "Theorem 1 sums the states and does not model which of them exist at the same time"


def paper(spec: Spec, facts: ModelFacts) -> Estimate:
    """Return the estimate of the paper's theorems for a spec, which is equal for all ranks.

    Quantities without a theorem are in `undefined`, with the reason.
    """
    placed = tuple(_placed_groups(spec, facts))
    undefined = {"activations": _NO_ACTIVATIONS, "peak": _NO_PEAK}
    homeless, reason, beyond = (
        _memory_is_undefined(spec),
        _traffic_is_undefined(spec),
        _other_axes_volume(spec),
    )
    if homeless:
        undefined["memory"] = homeless
    if reason or beyond:
        undefined["traffic"] = reason or beyond
    return Estimate(
        column=Column.PAPER,
        world_size=spec.world_size,
        memory=() if homeless else _memory(spec, placed, facts),
        traffic=()
        if reason
        else add_traffic(row for part in placed for row in _traffic(part.factors, part.sizes)),
        undefined=undefined,
    )


NumelOf = Callable[[UnitFacts | ModelFacts], int]
_numel: NumelOf = attrgetter("numel")


class Placed(NamedTuple):
    """Tensors with the same placement.

    Attributes:
        factors: Degree and placement by axis.
        sizes: Bytes by state.
        numel_of: Returns how many of their elements a unit or a model has.
    """

    factors: tuple[Factor, ...]
    sizes: dict[State, int]
    numel_of: NumelOf


def _placed_groups(spec: Spec, facts: ModelFacts) -> Iterator[Placed]:
    """Yield the groups of tensors with equal placement.

    This is one group, unless frozen parameters have different modes: they are then a group of
    parameters alone.
    """
    sizes, theta = state_sizes(spec, facts), State.PARAMETERS
    if not places_frozen(spec):
        yield Placed(spec.factors, sizes, _numel)
        return
    frozen = sizes[theta] - facts.trained_numel * itemsizes(spec)[theta]
    yield Placed(spec.factors, {**sizes, theta: sizes[theta] - frozen}, attrgetter("trained_numel"))
    own = {factor.axis: factor for factor in frozen_factors(spec)}
    yield Placed(tuple(own.get(f.axis, f) for f in spec.factors), {theta: frozen}, _frozen_numel)


def _frozen_numel(units: UnitFacts | ModelFacts) -> int:
    return units.numel - units.trained_numel


def _factors(spec: Spec) -> tuple[Factor, ...]:
    """Return all placements, including those of frozen parameters if they differ."""
    return (*spec.factors, *(frozen_factors(spec) if places_frozen(spec) else ()))


def itemsizes(spec: Spec) -> dict[State, int]:
    """Return the bytes per parameter of each state (Remark 1: 2, 12 and 2)."""
    layout = spec.precision.effective_layout
    return {
        State.PARAMETERS: layout.parameters.itemsize,
        State.OPTIMIZER: optimizer_itemsize(spec.optimizer, layout),
        State.GRADIENTS: layout.gradients.itemsize,
    }


def state_sizes(spec: Spec, facts: ModelFacts) -> dict[State, int]:
    """Return |X| in bytes. Ω and G exist only for trained parameters."""
    numel = {State.PARAMETERS: facts.numel - facts.quantized_numel}
    sizes = {
        state: size * numel.get(state, facts.trained_numel)
        for state, size in itemsizes(spec).items()
    }
    sizes[State.PARAMETERS] += facts.quantized_numel
    return sizes


def reconstruction_unit(facts: ModelFacts, numel_of: NumelOf = _numel) -> int:
    """Return the elements of the largest layer (Definition 3), or of a model without layers.

    `numel_of` selects the elements to count. By default, all are counted.

    Args:
        facts: The facts of the full model.
        numel_of: Returns the elements that count, of a unit or of the model. Default: all of them.
    """
    layers = [numel_of(unit) for unit in facts.units if unit.name] or [numel_of(facts)]
    return max(layers)


def _memory(spec: Spec, placed: Sequence[Placed], facts: ModelFacts) -> ByRank[Footprint]:
    """Return the rows of Theorem 1, equations (7) to (11), with the host's share, which (11) omits.

    A unit that a data axis all-gathers is sharded by the other axes (Definition 5), except pp,
    which keeps layers full.
    """
    # Definition 3's unit is one layer. pp keeps layers full, so it does not make the unit smaller.
    apart = (*DATA_AXES, Axis.PP)
    other = (f for f in spec.factors if f.axis not in apart and f.placement.parameters == S)
    ranks, whole_units = prod(factor.degree for factor in other), 0
    held = {state: Counter[str]() for state in MODEL_STATES}
    for part in placed:
        shares = compose_factors(part.factors)
        for state, size in part.sizes.items():
            held[state].update(
                {f"{tier}_bytes": shares[state].bytes_on_tier(tier, size) for tier in Tier}
            )
            if shares[state].needs_unit:
                unit = ceil_div(reconstruction_unit(facts, part.numel_of), ranks)
                whole_units += unit * itemsizes(spec)[state]
    rows = [*held.items(), (State.TRANSIENT, Counter({"device_bytes": whole_units}))]
    alike = [Footprint(state=state, rank=0, **tiers) for state, tiers in rows]
    return ByRank(([alike], [0] * spec.world_size))


def _traffic(factors: Sequence[Factor], sizes: dict[State, int]) -> Iterator[Traffic]:
    """Yield the traffic of Theorem 2 for each data axis, innermost first.

    The sizes on an outer axis are those that all inner axes leave, including axes without a volume
    in the theorem (Definition 5).
    """
    inner = IDENTITY
    # The mesh lists the outermost axis first, and Definition 5 composes from the inside.
    for factor in reversed(factors):
        if factor.axis in DATA_AXES:
            yield from _axis_traffic(
                factor, {state: inner[state].stored_bytes(sizes[state]) for state in sizes}
            )
        inner = compose(inner, factor_product(factor))


def _axis_traffic(factor: Factor, sizes: dict[State, int]) -> Iterator[Traffic]:
    """Yield the traffic of one data axis for states of these sizes."""
    group = Group((factor.axis,), factor.degree)
    if State.GRADIENTS in sizes:
        yield _synchronization(factor, sizes[State.GRADIENTS], group)
    if factor.placement.parameters.distribution is Distribution.GATHERED:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            calls = Calls(Collective.ALL_GATHER, State.PARAMETERS, phase)
            yield calls.traffic(group, sizes[State.PARAMETERS])


def _synchronization(factor: Factor, size: int, group: Group) -> Traffic:
    """Return the traffic of gradients, equations (12) and (13)."""
    mode = factor.placement.gradients.distribution
    match mode:
        case Distribution.REPLICATED:
            collective = Collective.ALL_REDUCE
        case Distribution.SHARDED:
            collective = Collective.REDUCE_SCATTER
        case Distribution.GATHERED | Distribution.MATERIALIZED:
            raise AssertionError(f"Theorem 2 has no case for gradients {mode}")
        case _:
            assert_never(mode)
    return Calls(collective, State.GRADIENTS, Phase.BACKWARD).traffic(group, size)


def _traffic_is_undefined(spec: Spec) -> str:
    """Return the reason why Theorem 2 does not cover the data axes, or an empty text."""
    for factor in _factors(spec):
        for state, known in _SYNCHRONIZED.items():
            mode = factor.placement[state]
            if factor.axis in DATA_AXES and mode not in known:
                return f"Theorem 2 has no case for {state} {mode}"
    return ""


def _other_axes_volume(spec: Spec) -> str:
    """Return the reason why the rows are not the full traffic, or an empty text."""
    others = [factor.axis for factor in spec.factors if factor.axis not in DATA_AXES]
    if not others:
        return ""
    return f"the paper gives no volume for the axis {' or '.join(others)}{left_to_others(spec)}"


# Equations (12) to (14). By Theorem 2, the update of optimizer state is local.
_SYNCHRONIZED = {
    State.PARAMETERS: (R, S, S_STAR),
    State.GRADIENTS: (R, S),
    State.OPTIMIZER: (R, S, M, OFFLOADED, Mode(Distribution.SHARDED, Tier.FILE)),
}


def _memory_is_undefined(spec: Spec) -> str:
    """Return the reason why Definition 2 does not cover the memory, or an empty text.

    It has five modes, of which O is sharded in host memory or on NVMe.
    """
    for factor in _factors(spec):
        for state in MODEL_STATES:
            mode = factor.placement[state]
            if mode.tier is not Tier.DEVICE and mode.distribution is not Distribution.SHARDED:
                return f"Definition 2 has no mode {mode} ({state}): its O is sharded"
    return ""


def notes(
    ghost: Wrapping, facts: ModelFacts, traffic: Iterable[Traffic], schedule: Schedule
) -> Iterator[str]:
    """Yield the sentences for a spec.

    Args:
        ghost: The wrapping of the full model or of a rank's part of it.
        facts: The full model.
        traffic: The traffic of the `exact` column.
        schedule: The pipeline schedule.
    """
    spec, plan = ghost.wrapped.spec, ghost.wrapped.plan
    if plan.pipeline is not None:
        yield from _stage_notes(plan, facts, schedule)
        return
    is_whole = ghost.wrapped.facts is facts
    yield from (ghost if is_whole else make_wrapping(spec, plan, facts)).notes()
    yield from _replicated_notes(plan, facts, sum(itemsizes(spec).values()))
    yield from _moment_notes(spec, plan, facts)
    yield from _copy_notes(traffic)


def _replicated_notes(plan: Plan, facts: ModelFacts, per_element: int) -> Iterator[str]:
    """Yield a note on parameters that tp replicates, although Theorem 1 divides all of |Θ|, |Ω| and
    |G|."""
    if (step := plan.tensor) is None:
        return
    cut = cut_dims(step, ((tensor.name, tensor.shape) for tensor in facts.tensors))
    apart = plan.experts.modules if plan.experts and plan.experts.folded else ()
    own = (tensor for tensor in facts.tensors if not is_within(tensor.name, apart))
    whole = sum(tensor.numel for tensor in own if tensor.name not in cut)
    if whole:
        yield (
            f"{whole:,} of {facts.numel:,} parameters belong to no sharded operator and are "
            f"replicated over {step.axis}: {format_bytes(whole * per_element)} of Θ, Ω and G "
            "before data-parallel sharding, of which the theorem counts one shard"
        )


def _moment_notes(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[str]:
    """Yield a note if the optimizer keeps other moments for some tensors than the theorems' |Ω|
    counts."""
    if len(spec.optimizer.names) == 1 and spec.optimizer.is_elementwise:
        return
    usual = moments_per_element(uniform_rule(spec.optimizer))
    elements: dict[tuple[str, int], int] = {}
    factored: dict[str, int] = {}
    itemsize = plan.update.layout.moments.itemsize
    for unit in facts.units:
        for tensor, own in zip(unit.trained, rules_of_unit(spec.optimizer, unit), strict=True):
            if OPTIMIZERS[own.name].factors:
                shapes = moment_shapes(own.name, own.hyper, tensor.shape).values()
                factored[own.name] = factored.get(own.name, 0) + sum(map(prod, shapes))
            kind = own.name, moments_per_element(own)
            elements[kind] = elements.get(kind, 0) + tensor.numel
    for name, numel in factored.items():
        yield (
            f"{name} stores {numel:,} elements of factored and full second moments, of which "
            f"|Ω| of the theorems has none: {format_bytes(numel * itemsize)} more in total"
        )
    for (name, moments), numel in elements.items():
        if moments != usual:
            size = abs(usual - moments) * numel * itemsize
            sign = "less" if moments < usual else "more"
            where = "block matrices" if OPTIMIZERS[name].remainder else "its parameters"
            yield (
                f"{name} stores {moments} moment{'s' * (moments != 1)} per element of {where} "
                f"({numel:,} of {facts.numel:,} elements), but |Ω| of the theorems has {usual} "
                f"per element: {format_bytes(size)} {sign} in total"
            )


_COPIES = {
    Collective.HOST_TO_DEVICE: "to the device",
    Collective.DEVICE_TO_HOST: "to the host",
    Collective.FILE_READ: "read from files",
    Collective.FILE_WRITE: "written to files",
}


def _copy_notes(traffic: Iterable[Traffic]) -> Iterator[str]:
    """Yield a note on copies between memory tiers."""
    totals: dict[str, int] = {}
    for row in traffic:
        if row.key.collective in _COPIES and row.key.phase is not Phase.SETUP:
            words = _COPIES[row.key.collective]
            totals[words] = totals.get(words, 0) + row.payload_bytes
    if totals:
        copies = ", ".join(f"{format_bytes(size)} {words}" for words, size in totals.items())
        yield f"copies between memory tiers, which no theorem counts: {copies} per step and rank"


# Effects of a pipeline that no theorem covers.


def _stage_notes(plan: Plan, facts: ModelFacts, schedule: Schedule) -> Iterator[str]:
    stages = plan.stages
    yield from _unequal_notes(facts, stages, schedule)
    yield from _tied_notes(facts, stages)
    yield from _gather_notes(plan, schedule)
    yield from _reduction_notes(plan, stages, schedule)


def _unequal_notes(facts: ModelFacts, stages: Sequence[Stage], schedule: Schedule) -> Iterator[str]:
    """Yield a note on unequal stages. Theorem 1 divides by pp, but a rank has full layers, and the
    first and last stages have more than layers."""
    held = [
        sum(stages[index].numel for index in schedule.stages_of(r)) for r in range(schedule.ranks)
    ]
    if len(set(held)) > 1:
        more = max(held) * schedule.ranks / facts.numel - 1
        yield (
            f"the ranks of pp have {' '.join(f'{numel:,}' for numel in held)} parameters: "
            f"the largest has {more:.1%} more than the equal shares of the theorem"
        )


def _tied_notes(facts: ModelFacts, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a note for each tensor that the first and the last stage share."""
    for name in stages[0].shared:
        tensor = next(tensor for tensor in facts.tensors if tensor.name == name)
        where = f"{name} is on the first and the last stage, {tensor.numel:,} parameters twice"
        summed = ", and the two sum its gradients"
        yield where if tensor.is_frozen else f"{where}{summed}"


def _gather_notes(plan: Plan, schedule: Schedule) -> Iterator[str]:
    """Yield a note on how often a data axis all-gathers a unit, if it is not once."""
    sync = plan.wrap.policy
    if sync is None or not plan.wrap.gathered_by_unit:
        return
    times = {
        (gathers.forward, gathers.backward)
        for gathers in (
            stage_gathers(schedule, stage, sync, is_root=is_root)
            for stage in range(schedule.stages)
            for is_root in (False, True)
        )
    }
    if times != {(1, 0)}:
        counts = " or ".join(
            f"{ahead} times in forward and {back} times in backward" for ahead, back in times
        )
        yield (
            f"a step has {schedule.microbatches} micro-batches; with this `sync`, a unit is "
            f"all-gathered {counts}; with reshard_after_forward and reshard_after_backward "
            "both false, once"
        )


def _reduction_notes(plan: Plan, stages: Sequence[Stage], schedule: Schedule) -> Iterator[str]:
    """Yield a note on the cost of sharded gradients on a data axis. Theorem 2 has one reduction."""
    if (sync := plan.wrap.policy) is None or not plan.wrap.reduced_by_unit:
        return
    num = count_reductions(sync, schedule.microbatches)
    if sync.gradients is GradientSync.EVERY and num > 1:
        yield (
            f"gradients are reduced after each of {num} micro-batches, {num}r|G| of the "
            "stage; with sync.gradients=last, they are reduced once, and until then every "
            "rank holds the full gradients of its stages"
        )
    elif num != schedule.microbatches:
        itemsize = plan.update.layout.reduced.itemsize
        most = max(
            sum(stages[index].numel for index in schedule.stages_of(rank))
            for rank in range(schedule.ranks)
        )
        yield (
            "with sync.gradients=last, gradients are R until the last micro-batch is "
            "reduced: a rank holds the full sum for its stages, up to "
            f"{format_bytes(most * itemsize)}"
        )


# -- the product of placements (Definition 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of one state on a rank: one of `parts` shards, with `copies` replicas each.

    `parts * copies` is the number of ranks. An `is_gathered` share is all-gathered unit by unit for
    use; an `is_materialized` one stores nothing between uses.
    """

    parts: int = 1
    copies: int = 1
    is_gathered: bool = False
    is_materialized: bool = False
    tier: Tier = Tier.DEVICE

    def stored_bytes(self, size: int) -> int:
        """Return the bytes stored between uses on any tier (Theorem 1 without s_unit)."""
        # Rounded up: shards are padded to equal sizes, and Theorem 1 counts the fullest rank.
        return 0 if self.is_materialized else ceil_div(size, self.parts)

    def bytes_on_tier(self, tier: Tier, size: int) -> int:
        """Return the bytes stored between uses on `tier`."""
        return self.stored_bytes(size) if tier is self.tier else 0

    @property
    def needs_unit(self) -> bool:
        """True if Theorem 1 adds s_unit, the memory of one full unit."""
        return self.is_gathered or self.is_materialized


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A composed placement over `ranks` ranks."""

    ranks: int = 1
    parameters: Share = Share()
    optimizer: Share = Share()
    gradients: Share = Share()
    activations: Share = Share()

    def __getitem__(self, state: State) -> Share:
        share: Share = getattr(self, state.value)
        return share


IDENTITY = Product()


def compose_factors(factors: Iterable[Factor]) -> Product:
    """Compose all factors of a mesh, given outermost first as in a spec."""
    return reduce(
        compose, (factor_product(factor) for factor in reversed(tuple(factors))), IDENTITY
    )


def compose(inner: Product, outer: Product) -> Product:
    """Return the product with `inner` within each group and `outer` across the groups."""
    shares = {state.value: _compose_shares(inner[state], outer[state]) for state in PLACED}
    return Product(ranks=inner.ranks * outer.ranks, **shares)


def factor_product(factor: Factor) -> Product:
    """Return one factor as a product."""
    if factor.degree == 1:
        return IDENTITY
    shares = {state.value: _make_share(factor.placement[state], factor.degree) for state in PLACED}
    return Product(ranks=factor.degree, **shares)


def _compose_shares(inner: Share, outer: Share) -> Share:
    return Share(
        parts=inner.parts * outer.parts,
        copies=inner.copies * outer.copies,
        is_gathered=inner.is_gathered or outer.is_gathered,
        is_materialized=inner.is_materialized or outer.is_materialized,
        # A share has one tier. If one axis offloads the state, the whole share leaves the device.
        tier=max(inner.tier, outer.tier, key=TIER_DISTANCE.__getitem__),
    )


def _make_share(mode: Mode, degree: int) -> Share:
    match mode.distribution:
        case Distribution.REPLICATED:
            return Share(copies=degree, tier=mode.tier)
        case Distribution.SHARDED:
            return Share(parts=degree, tier=mode.tier)
        case Distribution.GATHERED:
            return Share(parts=degree, is_gathered=True, tier=mode.tier)
        case Distribution.MATERIALIZED:
            # M has no tier: nothing is stored between uses.
            return Share(copies=degree, is_materialized=True)
        case _:
            assert_never(mode.distribution)
