"""How a search's blocks are cut: over which ranks operators or tokens go, and which of these the
states of a data axis go over too."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ptrain.axes.candidates import AxisChoice
from ptrain.selection.profile import Sizes
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCut:
    """How blocks are cut: by `ranks` ranks together, over `shared` of which go states of the data
    axes too. The `number` is that of a way to cut."""

    number: int
    ranks: int
    within: tuple[AxisChoice, ...]
    spec: Spec
    sizes: Sizes
    shape: tuple[tuple[Axis, int], ...]  # what cuts operators, whatever its tuples are
    axes: tuple[Axis, ...]  # all of them
    shared: int

    @classmethod
    def of(
        cls, number: int, ranks: int, within: tuple[AxisChoice, ...], spec: Spec, sizes: Sizes
    ) -> InnerCut:
        """Return what these choices say together."""
        factors = [(choice.shared, factor) for choice in within for factor in choice.factors]
        return cls(
            number=number,
            ranks=ranks,
            within=within,
            spec=spec,
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
