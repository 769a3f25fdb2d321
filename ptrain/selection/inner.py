"""How a search's blocks are cut: over which ranks operators or tokens go, and which of these the
states of a data axis go over too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ptrain.axes.candidates import AxisChoice
from ptrain.axes.expert.cost import rows_bytes
from ptrain.selection.activity import Activity, activity_of, with_rows
from ptrain.selection.profile import Sizes, exchange_seconds
from ptrain.selection.space import batched
from ptrain.selection.task import SearchTask
from ptrain.spec.activations import Kept
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCut:
    """How blocks are cut: by `ranks` ranks together, over `shared` of which go states of the data
    axes too. The `number` is that of a way to cut; `placed` is a spec with nothing beside it, and
    `spec` the same as it is scored."""

    number: int
    ranks: int
    within: tuple[AxisChoice, ...]
    spec: Spec
    sizes: Sizes
    shape: tuple[tuple[Axis, int], ...]  # what cuts operators, whatever its tuples are
    axes: tuple[Axis, ...]  # all of them
    shared: int
    placed: Spec

    @property
    def key(self) -> tuple[object, ...]:
        """Return what choices of the data axes beside it depend on."""
        return self.shape, self.axes, self.shared, self.sizes.shared_by

    @property
    def sampling(self) -> int:
        """Return how many of its ranks have samples of their own."""
        return self.placed.data_degree

    def activity(self, micro: int, kept: Kept, own: ModelShape | None) -> Activity:
        """Return the bytes of a micro-batch of so many samples, of a model with experts of `own`
        with their rows."""
        sized = replace(self.spec, batch=replace(self.spec.batch, micro=micro))
        activity = activity_of(sized, kept)
        return activity if own is None else with_rows(activity, rows_bytes(sized, own), kept)

    def waits(self, micro: int, kept: Kept, task: SearchTask) -> tuple[float, float]:
        """Return for how long a block waits, forward and backward, for rows of its experts."""
        if task.own is None:
            return 0.0, 0.0
        return exchange_seconds(batched(self.placed, micro, 1), task.own, task.pace, kept)

    @classmethod
    def of(
        cls,
        number: int,
        ranks: int,
        within: tuple[AxisChoice, ...],
        specs: tuple[Spec, Spec],
        sizes: Sizes,
    ) -> InnerCut:
        """Return what these choices say together; `specs` are as it is placed and as it is
        scored."""
        placed, spec = specs
        factors = [(choice.shared, factor) for choice in within for factor in choice.factors]
        return cls(
            number=number,
            ranks=ranks,
            within=within,
            spec=spec,
            placed=placed,
            sizes=sizes,
            shape=tuple((f.axis, f.degree) for shared, f in factors if shared == 1),
            axes=tuple(factor.axis for _, factor in factors),
            shared=prod(choice.shared for choice in within),
        )


def without_shared(degrees: tuple[int, ...], shared: int) -> tuple[int, ...] | None:
    """Return the degrees of the data axes themselves, where the innermost has all the ranks that
    are shared; None where it has not."""
    if shared == 1:
        return degrees
    *outer, last = degrees or (1,)
    return None if last % shared else (*outer, last // shared)
