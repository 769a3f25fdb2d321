"""What the steps of a plan say of the axes of its mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ptrain.spec.axis import SAMPLE_AXES, Axis
from ptrain.spec.spec import Spec
from ptrain.steps.kind import PlanStep


class _Mesh(Protocol):
    @property
    def axes(self) -> tuple[Axis, ...]: ...

    @property
    def degrees(self) -> tuple[int, ...]: ...


class PlanAxes:
    """The axes of a plan by what their ranks have."""

    __slots__ = ()
    spec: Spec
    steps: Sequence[PlanStep]
    mesh: _Mesh

    @property
    def sample_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have samples of their own, the outermost first."""
        return tuple(axis for axis in SAMPLE_AXES if axis in self.mesh.axes)

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks run other parts of a layer, or it on other tokens, outermost
        first."""
        cutting = [axis for step in self.steps for axis in step.cutting_axes]
        return tuple(axis for axis in self.mesh.axes if axis in cutting)

    @property
    def tokens(self) -> int:
        """How many tokens of a sample a rank has in all of the model."""
        axes = [axis for step in self.steps for axis in step.token_axes]
        return self.spec.batch.sequence // self._ranks_over(axes)

    @property
    def boundary_slices(self) -> int:
        """Into how many slices the tokens of a sample are cut between the blocks."""
        return self._ranks_over([axis for step in self.steps for axis in step.boundary_axes])

    def _ranks_over(self, axes: list[Axis]) -> int:
        degrees = zip(self.mesh.axes, self.mesh.degrees, strict=True)
        return math.prod(degree for axis, degree in degrees if axis in axes)

    @property
    def drawing_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks draw random numbers of their own."""
        return (*self.sample_axes, *(axis for step in self.steps for axis in step.drawing_axes))

    @property
    def summed_axes(self) -> tuple[Axis, ...]:
        """The axes along which gradients are summed, the outermost first."""
        summed = [axis for step in self.steps for axis in step.summed_axes]
        return tuple(axis for axis in self.mesh.axes if axis in summed)

    @property
    def loss_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have the same loss of the same samples."""
        return tuple(axis for step in self.steps for axis in step.loss_axes)
