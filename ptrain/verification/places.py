"""Where a rank is in a spec's mesh, row-major, outermost axis first; found from the spec alone, so
that a program that has it wrong is told."""

from __future__ import annotations

from ptrain.spec.placement import SAMPLE_AXES, TOKEN_AXES, Axis
from ptrain.spec.spec import Spec


def coordinates(spec: Spec, rank: int) -> dict[Axis, int]:
    """Return the rank's place along every axis of the mesh."""
    places: dict[Axis, int] = {}
    for factor in reversed(spec.factors):
        rank, places[factor.axis] = divmod(rank, factor.degree)
    return {factor.axis: places[factor.axis] for factor in spec.factors}


def data_place(spec: Spec, rank: int) -> int:
    """Return which share of every global batch is this rank's."""
    where, place = coordinates(spec, rank), 0
    for axis in SAMPLE_AXES:
        if axis in where:
            place = place * spec.degree(axis) + where[axis]
    return place


def token_place(spec: Spec, rank: int) -> int:
    """Return which slice of the tokens of its samples is this rank's; 0 where it has all."""
    where = coordinates(spec, rank)
    return next((where[axis] for axis in TOKEN_AXES if axis in where), 0)


def line(spec: Spec, rank: int, *axes: Axis) -> tuple[int, ...]:
    """The ranks that differ from this one along these axes alone, itself among them."""
    own = coordinates(spec, rank)
    return tuple(
        other
        for other in range(spec.world_size)
        if all(
            place == own[axis] or axis in axes for axis, place in coordinates(spec, other).items()
        )
    )
