"""Calls that every wrap issues alike: groups, gathers of units by policy, reduce-scatters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import gathers
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.spec.axis import Axis
from ptrain.spec.batch import ReduceScatterVia, SyncPolicy
from ptrain.spec.spec import Spec


def group_over(spec: Spec, axes: Sequence[Axis]) -> Group:
    """The group along `axes`."""
    return Group(tuple(axes), ranks_over(spec, axes))


def gather_calls(
    sync: SyncPolicy, num_micro: int, units: int, group: Group, payload: int
) -> Iterator[Traffic]:
    times = gathers(sync, num_micro)
    for phase, num in ((Phase.FORWARD, times.forward), (Phase.BACKWARD, times.backward)):
        if num:
            calls = Calls(Collective.ALL_GATHER, State.PARAMETERS, phase, units * num)
            yield calls.over(group, payload)


def reduce_scatter_calls(via: ReduceScatterVia, phase: Phase, times: int) -> Calls:
    substitute = None if via is ReduceScatterVia.NATIVE else via.value
    return Calls(Collective.REDUCE_SCATTER, State.GRADIENTS, phase, times, substitute)


def without(axes: Iterable[Axis], others: Iterable[Axis]) -> tuple[Axis, ...]:
    taken = set(others)
    return tuple(axis for axis in axes if axis not in taken)
