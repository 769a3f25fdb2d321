"""Ranks and coordinates: row-major over the mesh, the outermost axis first (as DeviceMesh)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec


def coordinates(spec: Spec, rank: int) -> dict[Axis, int]:
    """Return where `rank` stands on every axis of the mesh."""
    assert 0 <= rank < spec.world_size, f"rank {rank} is not in a world of {spec.world_size}"
    place: dict[Axis, int] = {}
    for factor in reversed(spec.factors):
        rank, place[factor.axis] = divmod(rank, factor.degree)
    return {factor.axis: place[factor.axis] for factor in spec.factors}


def rank_at(spec: Spec, place: Mapping[Axis, int]) -> int:
    """The rank at these coordinates."""
    rank = 0
    for factor in spec.factors:
        rank = rank * factor.degree + place[factor.axis]
    return rank


def groups(spec: Spec, axes: Sequence[Axis]) -> tuple[tuple[int, ...], ...]:
    """Every group over `axes`, in mesh order, by its lowest rank."""
    others = [factor.axis for factor in spec.factors if factor.axis not in axes]
    members: dict[int, list[int]] = {}
    for rank, place in enumerate(positions(spec, others)):
        members.setdefault(place, []).append(rank)
    return tuple(map(tuple, members.values()))


def position(spec: Spec, rank: int, axes: Sequence[Axis]) -> int:
    """The index of `rank` in its group over `axes`: which shard it holds."""
    place = coordinates(spec, rank)
    index = 0
    for factor in spec.factors:
        if factor.axis in axes:
            index = index * factor.degree + place[factor.axis]
    return index


def place_of(spec: Spec, axes: Sequence[Axis], index: int) -> dict[Axis, int]:
    """Return where the ranks of that `position` stand along `axes`."""
    places: dict[Axis, int] = {}
    for factor in reversed(spec.factors):
        if factor.axis in axes:
            index, places[factor.axis] = divmod(index, factor.degree)
    return places


def positions(spec: Spec, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the `position` of every rank, computed in one pass over the ranks."""
    return _positions(tuple([(factor.degree, factor.axis in axes) for factor in spec.factors]))


@lru_cache(maxsize=2**6)
def _positions(factors: tuple[tuple[int, bool], ...]) -> tuple[int, ...]:
    """Return it of these degrees, and whether each is one of the axes."""
    indices = [0]
    for degree, is_along in factors:
        if is_along:
            indices = [index * degree + here for index in indices for here in range(degree)]
        else:
            indices = [index for index in indices for _ in range(degree)]
    return tuple(indices)


def ranks_over(spec: Spec, axes: Sequence[Axis]) -> int:
    """Return how many ranks a group over `axes` has."""
    return math.prod(spec.degree(axis) for axis in axes)
