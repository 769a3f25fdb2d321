"""What the data axes offer to a search: every factorization over copies and shards, the tuples that
are of use, and the dials by which the same tuple moves more or holds more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, product
from operator import itemgetter
from typing import Any

from ptrain.axes.candidates import AxisChoice, AxisSpace, Way, Written, divisors
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


def _tuple(parameters: Mode, optimizer: Mode, gradients: Mode) -> Placement:
    return Placement(parameters=parameters, optimizer=optimizer, gradients=gradients)


_WHOLE, _SPREAD = _tuple(R, R, R), _tuple(R, S, R)
_GATHERED = (_tuple(S_STAR, S, S), _tuple(M, S, S))
_ON_HOST = (
    _tuple(R, OFFLOADED, S),
    _tuple(R, OFFLOADED, OFFLOADED),
    _tuple(S_STAR, OFFLOADED, OFFLOADED),
    _tuple(Mode(Distribution.GATHERED, Tier.HOST), OFFLOADED, OFFLOADED),
)
_SHARDED = (_SPREAD, _tuple(R, S, S), *_GATHERED, *_ON_HOST)

# When units that are gathered are given back (after forward, after backward), by when gradients
# are reduced: what the others move between these, they hold between these too.
_GIVEN_BACK = {
    GradientSync.EVERY: ((True, True), (False, True)),
    GradientSync.LAST: ((True, True), (False, False)),
}
_OTHER_UNITS = (None, UnitSize(kind=UnitKind.BLOCKS, count=2), UnitSize(kind=UnitKind.SUB_BLOCK))
_NOT_JOINED = (UnitSize(), UnitSize(kind=UnitKind.MODEL))  # where blocks join by themselves
UNITS = (*_OTHER_UNITS, *_NOT_JOINED)
OVERLAPS = (None, Overlap.NONE, Overlap.BACKWARD)


# Fields that are not chosen, and stay as they are written.
_FIXED = ("bucket_bytes", "reduce_scatter", "gather_after_update", "offload")


def _sizes(spec: Spec, devices: int, written: Written) -> Iterator[int]:
    yield from divisors(devices)


def _choices(spec: Spec, ranks: int, written: Written) -> Iterator[AxisChoice]:
    if ranks == 1:
        yield AxisChoice(changes=_STOCK)
        return
    for replicas in divisors(ranks):
        degrees = (replicas, ranks // replicas)
        axes = tuple(axis for axis, degree in zip(DATA_AXES, degrees, strict=True) if degree > 1)
        for placements, alike in groupby(_ways(axes, spec, written), itemgetter(0)):
            factors = tuple(
                Factor(axis=axis, degree=degrees[DATA_AXES.index(axis)], placement=placement)
                for axis, placement in zip(axes, placements, strict=True)
            )
            yield from (AxisChoice(factors=factors, changes=changes) for _, changes in alike)


_STOCK: Changes = (("sync", SyncPolicy(gradients=GradientSync.LAST)),)


def _ways(axes: tuple[Axis, ...], spec: Spec, written: Written) -> tuple[Way, ...]:
    """The tuples and dials on these axes, whatever their degrees are."""
    has_master = spec.precision.layout.master is not None
    held: tuple[Way, ...] = _held(axes, spec.optimizer, has_master, written)
    return held


@lru_cache(maxsize=64)
def _held(axes: tuple[Axis, ...], optimizer: Any, has_master: bool, written: Written) -> Any:
    return written.held(axes, _of_axes(axes, optimizer, has_master, written.away), _FIXED)


def _of_axes(
    axes: tuple[Axis, ...], optimizer: Any, has_master: bool, away: Tier
) -> tuple[Way, ...]:
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
        placements = tuple(DATA.nearest(_on(away, p), optimizer) for p in combination)
        if has_master or all(placement.parameters != M for placement in placements):
            ways += [(placements, changes) for changes in _dials(placements)]
    return tuple(dict.fromkeys(ways))


def _on(away: Tier, placement: Placement) -> Placement:
    """Return a tuple with what it has on the host on another tier."""
    modes = {state.value: placement[state] for state in PLACED}
    moved = {
        name: replace(mode, tier=away) for name, mode in modes.items() if mode.tier is Tier.HOST
    }
    return replace(placement, **moved)


def _dials(placements: tuple[Placement, ...]) -> Iterator[Changes]:
    """What else may be said beside these tuples; where it is not obeyed legality says so."""
    is_whole = all(p.gradients.distribution is Distribution.REPLICATED for p in placements)
    is_gathered = any(p.parameters != R for p in placements)
    for when in (GradientSync.LAST,) if is_whole else tuple(GradientSync):
        for after_forward, after_backward in _GIVEN_BACK[when] if is_gathered else ((True, True),):
            sync = SyncPolicy(
                gradients=when,
                reshard_after_forward=after_forward,
                reshard_after_backward=after_backward,
            )
            overlaps = _overlaps(is_whole=is_whole, is_gathered=is_gathered)
            units = _OTHER_UNITS if is_gathered else UNITS
            for unit, (overlap, prefetch) in product(units, overlaps):
                yield (
                    ("sync", sync),
                    ("unit", unit),
                    ("overlap", overlap),
                    ("prefetch", prefetch),
                )


def _overlaps(
    *, is_whole: bool, is_gathered: bool
) -> tuple[tuple[Overlap | None, int | None], ...]:
    """Return when gradients are reduced, what happens by itself first, and how many units are
    gathered ahead: what is not beside what is computed begins none."""
    other = Overlap.BACKWARD if is_whole else Overlap.NONE
    ahead = ((Overlap.BACKWARD, 1),) if is_gathered else ()
    return ((None, None), (other, None), *ahead)


def is_left_out(spec: Spec, written: Written) -> bool:
    """Return whether a dial of a candidate is left out, if nobody wrote it. DDP and FSDP2 reduce
    beside the backward pass by themselves, and nobody looks at them without. Where blocks do not
    join a unit is a block by itself, and whole models are not brought at once."""
    if spec.unit in _NOT_JOINED and not written.says("unit"):
        return not may_join_units(spec, form_of(spec))
    if spec.overlap is None or written.says("overlap"):
        return False
    return form_of(spec) is not Form.FLAT


SPACE = AxisSpace(
    axes=DATA_AXES,
    sizes=_sizes,
    choices=_choices,
    tuples={Axis.DP_REPLICATE: (_WHOLE, _SPREAD), Axis.DP_SHARD: _SHARDED},
)
