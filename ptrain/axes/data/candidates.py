"""The search space of the data axes: factorizations, useful tuples, and options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, product
from operator import itemgetter
from typing import Any

from ptrain.axes.candidates import AxisChoice, AxisOption, AxisSpace, FixedChoices, divisors
from ptrain.axes.data.form import form_of, may_join_units
from ptrain.axes.data.rules import DATA
from ptrain.cost import PLACED
from ptrain.spec.dials import GradientSync, Overlap, SyncPolicy, UnitKind, UnitSize
from ptrain.spec.placement import (
    DATA_AXES,
    OFFLOADED,
    S_STAR,
    Axis,
    Distribution,
    Factor,
    M,
    Mode,
    Placement,
    R,
    S,
    Tier,
)
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import Form

Changes = tuple[tuple[str, Any], ...]


def _placement_of(parameters: Mode, optimizer: Mode, gradients: Mode) -> Placement:
    """Return a placement with these modes and default activations."""
    return Placement(parameters=parameters, optimizer=optimizer, gradients=gradients)


_WHOLE, _SPREAD = _placement_of(R, R, R), _placement_of(R, S, R)
_GATHERED = (_placement_of(S_STAR, S, S), _placement_of(M, S, S))
_ON_HOST = (
    _placement_of(R, OFFLOADED, S),
    _placement_of(R, OFFLOADED, OFFLOADED),
    _placement_of(S_STAR, OFFLOADED, OFFLOADED),
    _placement_of(Mode(Distribution.GATHERED, Tier.HOST), OFFLOADED, OFFLOADED),
)
_SHARDED = (_SPREAD, _placement_of(R, S, S), *_GATHERED, *_ON_HOST)

# Options for freeing all-gathered units (after forward, after backward), by when gradients are
# reduced. Other combinations trade the same memory and traffic as these.
_FREEING = {
    GradientSync.EVERY: ((True, True), (False, True)),
    GradientSync.LAST: ((True, True), (False, False)),
}
_OTHER_UNITS = (None, UnitSize(kind=UnitKind.BLOCKS, count=2), UnitSize(kind=UnitKind.SUB_BLOCK))
# only of interest where blocks join to larger units by default
_NOT_JOINED = (UnitSize(), UnitSize(kind=UnitKind.MODEL))
UNITS = (*_OTHER_UNITS, *_NOT_JOINED)
OVERLAPS = (None, Overlap.NONE, Overlap.BACKWARD)


# Fields that the search does not vary.
_FIXED = ("bucket_bytes", "reduce_scatter", "gather_after_update", "offload")


def _axis_sizes(spec: Spec, devices: int, written: FixedChoices) -> Iterator[int]:
    """Yield the possible numbers of ranks on the data axes."""
    yield from divisors(devices)


def _iter_choices(spec: Spec, ranks: int, written: FixedChoices) -> Iterator[AxisChoice]:
    """Yield every choice of degrees, tuples and options for this number of ranks."""
    if ranks == 1:
        yield AxisChoice(changes=_STOCK)
        return
    for replicas in divisors(ranks):
        degrees = (replicas, ranks // replicas)
        axes = tuple(axis for axis, degree in zip(DATA_AXES, degrees, strict=True) if degree > 1)
        for placements, alike in groupby(_ways_on_axes(axes, spec, written), itemgetter(0)):
            factors = tuple(
                Factor(axis=axis, degree=degrees[DATA_AXES.index(axis)], placement=placement)
                for axis, placement in zip(axes, placements, strict=True)
            )
            yield from (AxisChoice(factors=factors, changes=changes) for _, changes in alike)


_STOCK: Changes = (("sync", SyncPolicy(gradients=GradientSync.LAST)),)


def _ways_on_axes(
    axes: tuple[Axis, ...], spec: Spec, written: FixedChoices
) -> tuple[AxisOption, ...]:
    """Return the tuples and options on these axes, independent of the degrees."""
    # Only the fields on which the result depends are arguments of the cached function. A full spec
    # would differ for each candidate.
    has_master = spec.precision.layout.master is not None
    held: tuple[AxisOption, ...] = _allowed_ways(axes, spec.optimizer, has_master, written)
    return held


@lru_cache(maxsize=64)
def _allowed_ways(
    axes: tuple[Axis, ...], optimizer: Any, has_master: bool, written: FixedChoices
) -> Any:
    """Return the tuples and options that the written spec allows, cached."""
    return written.agreeing_options(
        axes, _all_ways(axes, optimizer, has_master, written.offload_tier), _FIXED
    )


def _all_ways(
    axes: tuple[Axis, ...], optimizer: Any, has_master: bool, away: Tier
) -> tuple[AxisOption, ...]:
    """Return all tuples and options on these axes, each legal for the optimizer."""
    combinations: list[tuple[Placement, ...]]
    match axes:
        case (Axis.DP_REPLICATE,):
            combinations = [(_WHOLE,), (_SPREAD,)]
        case (Axis.DP_SHARD,):
            combinations = [(sharded,) for sharded in _SHARDED]
        case _:
            combinations = [(_WHOLE, sharded) for sharded in _SHARDED]
            combinations += [(_SPREAD, gathered) for gathered in _GATHERED]
    ways = []
    for combination in combinations:
        placements = tuple(DATA.nearest_legal(_on_tier(away, p), optimizer) for p in combination)
        if has_master or all(placement.parameters != M for placement in placements):
            ways += [(placements, changes) for changes in _option_changes(placements)]
    return tuple(dict.fromkeys(ways))


def _on_tier(away: Tier, placement: Placement) -> Placement:
    """Return a placement whose host states are on another tier."""
    modes = {state.value: placement[state] for state in PLACED}
    moved = {
        name: replace(mode, tier=away) for name, mode in modes.items() if mode.tier is Tier.HOST
    }
    return replace(placement, **moved)


def _option_changes(placements: tuple[Placement, ...]) -> Iterator[Changes]:
    """Yield the options to try with these tuples; legality rejects options without effect."""
    is_whole = all(p.gradients.distribution is Distribution.REPLICATED for p in placements)
    is_gathered = any(p.parameters != R for p in placements)
    for when in (GradientSync.LAST,) if is_whole else tuple(GradientSync):
        for after_forward, after_backward in _FREEING[when] if is_gathered else ((True, True),):
            sync = SyncPolicy(
                gradients=when,
                reshard_after_forward=after_forward,
                reshard_after_backward=after_backward,
            )
            overlaps = _overlap_options(is_whole=is_whole, is_gathered=is_gathered)
            units = _OTHER_UNITS if is_gathered else UNITS
            for unit, (overlap, prefetch) in product(units, overlaps):
                yield (
                    ("sync", sync),
                    ("unit", unit),
                    ("overlap", overlap),
                    ("prefetch", prefetch),
                )


def _overlap_options(
    *, is_whole: bool, is_gathered: bool
) -> tuple[tuple[Overlap | None, int | None], ...]:
    """Return pairs of `overlap` and `prefetch` to try.

    None is the default. Units are prefetched only with overlap. Without prefetching, overlap takes
    as much memory as no overlap, and less time.
    """
    other = Overlap.BACKWARD if is_whole else Overlap.NONE
    ahead = ((Overlap.BACKWARD, 0), (Overlap.BACKWARD, 1)) if is_gathered else ()
    return ((None, None), (other, None), *ahead)


def is_left_out(spec: Spec, written: FixedChoices) -> bool:
    """Return True if a candidate's option is skipped because the user did not write it.

    DDP and FSDP2 overlap by default, so their variants without overlap are not tried. If blocks do
    not join to larger units, the default unit is a block already, and full models as one unit are
    not tried.
    """
    if spec.unit in _NOT_JOINED and not written.sets_field("unit"):
        return not may_join_units(spec, form_of(spec))
    if spec.overlap is None or written.sets_field("overlap"):
        return False
    return form_of(spec) is not Form.FLAT


SPACE = AxisSpace(
    axes=DATA_AXES,
    sizes=_axis_sizes,
    choices=_iter_choices,
    tuples={Axis.DP_REPLICATE: (_WHOLE, _SPREAD), Axis.DP_SHARD: _SHARDED},
)
