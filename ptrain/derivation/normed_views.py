"""The views of a rank's part of G of which there is a norm each, where those of tensors that an
operator axis cuts are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

from ptrain.axes.data.cost import runs, shard_runs, whole_runs
from ptrain.axes.data.cuts import Axes
from ptrain.axes.data.update import UnitState
from ptrain.rooms.ghost import Ghost
from ptrain.spec.axis import Axis
from ptrain.steps.step import Clip

Views = tuple[tuple[int, bool], ...]  # elements, and whether their operators are cut
Degrees = tuple[tuple[Axis, int], ...]
# Of equal units: elements and flag of each tensor, the axes that cut their G, the size of their
# buffers, and the axes that cut anything, with their degrees.
Cut = tuple[Views, Axes, int, Axes, tuple[int, ...]]


class NormedViews:
    """The views of all units; equal units have equal ones."""

    def __init__(self, states: Iterable[tuple[UnitState[Ghost], int]]) -> None:
        """`states`: each with how many units are like it."""
        numbers: dict[Cut, int] = {}
        self._number_of: list[int] = []  # by unit
        self._cut_over: list[Axes] = []  # by unit
        degrees: dict[Axis, int] = {}
        for state, times in states:
            members, gradients, cuts = state.members, state.gradients, state.cuts
            if gradients.kept is None:
                continue
            tensors = tuple(zip(map(math.prod, members.shapes), members.are_cut, strict=True))
            kind = tensors, gradients.now, cuts.padded, cuts.axes, cuts.degrees
            self._number_of += [numbers.setdefault(kind, len(numbers))] * times
            self._cut_over += [members.cutting_axes] * times
            degrees |= {axis: cuts.room.degree(axis) for axis in gradients.now}
        self._cuts, self._axes = tuple(numbers), tuple(degrees)
        self._views: list[tuple[Views, ...]] = []

    def kinds(self, degrees: Degrees) -> Sequence[int]:
        """Return for each shard over axes, the outermost first, a number that shards share which
        have the same views."""
        kinds, self._views = _kinds(self._cuts, degrees)
        return kinds

    def by_operator(self, kind: int, clip: Clip) -> list[list[int]]:
        """Return the elements of all views of a kind of shard, in the groups of the norm."""
        of_kinds, whole = self._views[kind], len(clip.groups) - 1
        groups: list[list[int]] = [[] for _ in clip.groups]
        for number, cut_over in zip(self._number_of, self._cut_over, strict=True):
            cut = clip.group_of(cut_over)
            for numel, is_cut in of_kinds[number]:
                groups[cut if is_cut else whole].append(numel)
        return groups


@lru_cache(maxsize=2**8)
def _kinds(cuts: tuple[Cut, ...], degrees: Degrees) -> tuple[list[int], list[tuple[Views, ...]]]:
    """Return the number of the views of each shard over axes, and by number those in a unit of each
    kind. A search asks of the same units hundreds of times."""
    of_cuts = [_of_shards(cut, degrees) for cut in cuts]
    shards = zip(*of_cuts, strict=True) if cuts else [()] * math.prod(d for _, d in degrees)
    numbers: dict[tuple[Views, ...], int] = {}
    kinds = [numbers.setdefault(views, len(numbers)) for views in shards]
    return kinds, [*numbers]


@lru_cache(maxsize=2**10)
def _of_shards(cut: Cut, degrees: Degrees) -> list[Views]:
    """Return the views in a unit of each shard over axes; along one that does not cut G there is
    one place."""
    tensors, cutting, padded, axes, own = cut
    if {*axes} <= {*cutting}:  # a shard is one stretch
        views = _in_order(tensors, padded, math.prod(own))
        strides = {axis: math.prod(own[at + 1 :]) for at, axis in enumerate(axes)}
        indices = [0]
        for axis, degree in degrees:
            steps = [strides.get(axis, 0) * place for place in range(degree)]
            indices = [index + step for index in indices for step in steps]
        return [views[index] for index in indices]
    all_views = []
    for place in product(*(range(degree) for _, degree in degrees)):
        at = dict(zip((axis for axis, _ in degrees), place, strict=True))
        places = tuple([at.get(axis, 0) if axis in cutting else None for axis in axes])
        all_views.append(_views(shard_runs(tensors, padded, own, places)))
    return all_views


def _in_order(tensors: Views, padded: int, shards: int) -> list[Views]:
    """Return the views of each of so many stretches of a buffer: most lie within one run of
    tensors whose operators are alike."""
    size = padded // shards
    views: list[Views | None] = [None] * shards
    for start, end, is_cut in whole_runs(tensors, padded):
        first, last = -(-start // size), end // size
        views[first:last] = [((size, is_cut),)] * (last - first)
    return [
        _views(runs(tensors, padded, [(index * size, (index + 1) * size)]))
        if alone is None
        else alone
        for index, alone in enumerate(views)
    ]


def _views(of_shard: Iterable[tuple[int, int, bool]]) -> Views:
    return tuple([(end - start, is_cut) for start, end, is_cut in of_shard])
