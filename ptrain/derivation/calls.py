"""Calls that every wrap issues alike: groups, reduce-scatters by policy."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.algebra.layout import ranks_over
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State
from ptrain.spec.axis import Axis
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.spec import Spec


def group_over(spec: Spec, axes: Sequence[Axis]) -> Group:
    """The group along `axes`."""
    return Group(tuple(axes), ranks_over(spec, axes))


def reduce_scatter_calls(via: ReduceScatterVia, phase: Phase, times: int) -> Calls:
    substitute = None if via is ReduceScatterVia.NATIVE else via.value
    return Calls(Collective.REDUCE_SCATTER, State.GRADIENTS, phase, times, substitute)
