"""On how many of a cluster's nodes the ranks of a group are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec

Degrees = tuple[tuple[str, int], ...]  # of the mesh, outermost axis first


class Network:
    """The groups of a spec's ranks, `devices_per_node` of which are on a node; `world` ranks in
    all, on so many `nodes`."""

    def __init__(self, spec: Spec) -> None:
        self._degrees = tuple((factor.axis.value, factor.degree) for factor in spec.factors)
        self._per_node = spec.cluster.devices_per_node if spec.cluster else spec.world_size
        self.world = spec.world_size
        self.nodes = -(-self.world // self._per_node)
        self._names: dict[Sequence[Axis], tuple[str, ...]] = {}

    def ordered(self, axes: Sequence[Axis]) -> tuple[str, ...]:
        """Return the names of axes, in the order of the mesh."""
        key = tuple(axes)
        if key not in self._names:
            self._names[key] = tuple(name for name, _ in self._degrees if name in key)
        return self._names[key]

    def group(self, axes: tuple[str, ...], neighbours: int | None = None) -> tuple[int, int]:
        """Return how many ranks a group along `axes` has (or `neighbours`, that many ranks of it
        next to each other), and on how many nodes they are, where they are on most."""
        members, _ = _group(self._degrees, axes)
        number = neighbours or len(members)
        starts = range(0, len(members), number)
        return number, self._nodes(axes, tuple(starts), number)

    def pair(self, axis: Axis) -> int:
        """Return on how many nodes two ranks are that follow each other along an axis: on two, if
        any such pair is."""
        axes = (axis.value,)
        members, _ = _group(self._degrees, axes)
        return self._nodes(axes, tuple(range(len(members) - 1)), 2)

    def ends(self, axis: Axis) -> int:
        """Return on how many nodes the first and the last rank along an axis are."""
        axes = (axis.value,)
        members, others = _group(self._degrees, axes)
        last = members[-1]
        return max(
            len({rank // self._per_node, (rank + last) // self._per_node}) for rank in others
        )

    def _nodes(self, axes: tuple[str, ...], starts: tuple[int, ...], number: int) -> int:
        return _nodes(self._degrees, axes, self._per_node, starts, number)


@lru_cache(maxsize=256)  # the variants of a search have few meshes
def _group(degrees: Degrees, axes: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return the ranks of the first group along `axes`, and the first ranks of all groups."""
    members, others = [0], [0]
    stride = 1
    for name, degree in reversed(degrees):
        steps = [stride * place for place in range(degree)]
        if name in axes:
            members = [high + low for high, low in product(steps, members)]
        else:
            others = [high + low for high, low in product(steps, others)]
        stride *= degree
    return members, others


@lru_cache(maxsize=256)
def _nodes(
    degrees: Degrees, axes: tuple[str, ...], per_node: int, starts: tuple[int, ...], number: int
) -> int:
    """Return the most nodes that `number` ranks of a group are on, beginning at any of `starts`."""
    members, others = _group(degrees, axes)
    return max(
        len({(first + rank) // per_node for rank in members[start : start + number]})
        for start in starts
        for first in others
    )
