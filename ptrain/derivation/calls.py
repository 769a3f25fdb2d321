"""The group along some axes, as every wrap issues its calls over it."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.axes.ring import Group
from ptrain.spec.axis import Axis
from ptrain.spec.layout import ranks_over
from ptrain.spec.spec import Spec


def group_over(spec: Spec, axes: Sequence[Axis]) -> Group:
    """The group along `axes`."""
    return Group(tuple(axes), ranks_over(spec, axes))
