"""What a wrapper may do that its spec does not say, as other specs: the one that predicts what was
measured names the cause.

A cause is named where it predicts every figure to the byte; or where it predicts some that departed
and none that held departs, if these are all of a kind of call at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from ptrain.algebra.legality import is_sound
from ptrain.axes.data.form import data_factors
from ptrain.spec.dials import GradientSync, Reshard, UnitKind, UnitSize
from ptrain.spec.placement import OFFLOADED, S_STAR, Distribution, Mode, Placement, R, S, Tier
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec

_TUPLES = {
    Placement(parameters=R, optimizer=R, gradients=R): "every rank has the whole model, as in ddp",
    Placement(parameters=R, optimizer=S, gradients=R): "the optimizer alone is in slices",
    Placement(parameters=R, optimizer=S, gradients=S): "parameters stay whole between the steps",
    Placement(parameters=S_STAR, optimizer=S, gradients=S): "all states are in slices",
    Placement(
        parameters=Mode(Distribution.GATHERED, Tier.HOST),
        optimizer=OFFLOADED,
        gradients=OFFLOADED,
    ): "the slices are on the host, as with CPUOffloadPolicy",
}


@dataclass(frozen=True, slots=True)
class Otherwise:
    """A spec that says something else, what a wrapper does by it, and the words that say it."""

    spec: Spec
    does: str
    words: str


def otherwise(spec: Spec) -> Iterator[Otherwise]:
    """Yield legal specs whose data axes do something else: in one way, then in two."""
    ways = (_reshards, _syncs, _units, _placements, _layouts)
    singles = [(way, other) for way in ways for other in way(spec) if is_sound(other.spec)]
    yield from (other for _, other in singles)
    for (way, first), (second_way, second) in combinations(singles, 2):
        if way is second_way:
            continue
        for both in second_way(first.spec):
            if both.words == second.words and is_sound(both.spec):
                does, words = f"{first.does}, and {both.does}", f"{first.words} and {both.words}"
                yield Otherwise(both.spec, does, words)


def _reshards(spec: Spec) -> Iterator[Otherwise]:
    """What is done with gathered units after forward."""
    degree = spec.data_degree
    ways: dict[bool | int | Reshard, str] = {
        Reshard.NON_ROOT: "the root stays gathered from forward to backward, as fully_shard has it "
        "without reshard_after_forward",
        False: "units stay gathered from forward to backward",
        True: "units, the root too, are given back after forward",
    }
    ways |= {
        shards: f"units are kept in {shards} shards from forward to backward"
        for shards in range(2, degree // 2 + 1)
        if degree % shards == 0
    }
    for value, does in ways.items():
        now = spec.sync.reshard_after_forward
        if type(value) is not type(now) or value != now:
            sync = replace(spec.sync, reshard_after_forward=value)
            yield Otherwise(replace(spec, sync=sync), does, f"reshard: {str(value).lower()}")


def _syncs(spec: Spec) -> Iterator[Otherwise]:
    """When accumulated gradients are reduced."""
    if spec.batch.accumulate == 1:
        return
    for value in GradientSync:
        if value is not spec.sync.gradients:
            sync = replace(spec.sync, gradients=value)
            does = f"gradients are reduced after {value} micro-batch"
            yield Otherwise(replace(spec, sync=sync), does, f"sync: {{gradients: {value}}}")


def _units(spec: Spec) -> Iterator[Otherwise]:
    """What is gathered together. Other sizes need facts of their own."""
    if spec.unit_size.kind is not UnitKind.MODEL:
        other = replace(spec, unit=UnitSize(kind=UnitKind.MODEL))
        yield Otherwise(other, "the whole model is one unit", f"unit: {UnitKind.MODEL}")


def _placements(spec: Spec) -> Iterator[Otherwise]:
    """Where the states are."""
    factors = data_factors(spec)
    for placement, does in _TUPLES.items():
        if all(factor.placement == placement for factor in factors):
            continue
        placed = tuple(
            replace(factor, placement=placement) if factor in factors else factor
            for factor in spec.factors
        )
        words = ", ".join(f"{factor.axis}: [{placement}]" for factor in factors)
        yield Otherwise(replace(spec, factors=placed), does, f"placement: {{{words}}}")


def _layouts(spec: Spec) -> Iterator[Otherwise]:
    """How wide the states are."""
    for name, layout in LAYOUTS.items():
        if layout != spec.precision.layout and not spec.precision.compute_fp64:
            other = replace(spec, precision=replace(spec.precision, layout=layout))
            yield Otherwise(other, f"dtypes are those of {name}", f"precision: {{layout: {name}}}")
