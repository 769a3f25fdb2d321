"""Theorems 1 and 2 as printed: the `paper` column.

|X| is the layout's bytes per parameter times the number of parameters. s_unit (Definition 3, one
layer) is counted as `transient`, so that the sum of the states equals the printed figure. Nothing
is corrected: additional traffic of a real rank is in the `exact` column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import attrgetter
from typing import NamedTuple, assert_never

from ptrain.algebra.compose import IDENTITY, compose, compose_factors, factor_product
from ptrain.axes.context.attention import left_to_others
from ptrain.axes.data.form import frozen_factors, places_frozen
from ptrain.axes.ring import Calls, Group
from ptrain.by_rank import ByRank
from ptrain.cost import Collective, Column, Estimate, Footprint, Phase, State, Traffic, add_traffic
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.optimizers.update import optimizer_itemsize
from ptrain.spec.placement import (
    DATA_AXES,
    OFFLOADED,
    S_STAR,
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
from ptrain.units import ceil_div

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
    frozen = _frozen_numel(facts) * itemsizes(spec)[theta]
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
    numel = {State.PARAMETERS: facts.numel}
    return {
        state: size * numel.get(state, facts.trained_numel)
        for state, size in itemsizes(spec).items()
    }


def reconstruction_unit(facts: ModelFacts, numel_of: NumelOf = _numel) -> int:
    """Return the elements of the largest layer (Definition 3), or of a model without layers.

    `numel_of` selects the elements to count. By default, all are counted.
    """
    layers = [numel_of(unit) for unit in facts.units if unit.name] or [numel_of(facts)]
    return max(layers)


def _memory(spec: Spec, placed: Sequence[Placed], facts: ModelFacts) -> ByRank[Footprint]:
    """Return the rows of Theorem 1, equations (7) to (11), with the host's share, which (11) omits.

    A unit that a data axis all-gathers is sharded by the other axes (Definition 5), except pp,
    which keeps layers full.
    """
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
