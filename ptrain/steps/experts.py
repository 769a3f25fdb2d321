"""The step of the expert axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptrain.facts.model import prefixes
from ptrain.spec.axis import Axis
from ptrain.steps.kind import PlanStep

Span = tuple[int, int]  # first token, and the one behind the last


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel(PlanStep):
    """Theta, Omega and G of a layer's experts are S on `axes`, by expert: a rank has some of them,
    all tokens that go to these, of all ranks' samples, travel to it, and what it makes of them
    travels back. For all else `axis` is a data axis: its ranks have samples of their own. Those of
    `folded`, an axis that cuts operators, have the same tokens of them: one routes a slice of
    these. What routers choose of whole samples is then counted over `counting` axes, whose ranks
    route the tokens in `spans`.

    `modules` are those that hold the experts of a layer, and units of their own; each of their
    tensors has an expert for every place of its first dimension, a `number` of them. A token
    chooses so many (`chosen`), each of which gets a row of `features` elements, in one of its
    `places` for a rank's tokens of a sample where an expert has some: not all that are routed to
    it then. Where it `overlaps`, experts that all tokens go to compute while the others' rows
    travel.
    """

    axis: Axis
    modules: tuple[str, ...]
    number: int
    chosen: int
    features: int
    places: int | None = None
    overlaps: bool = False
    folded: tuple[Axis, ...] = ()
    counting: tuple[Axis, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes along which ranks have experts of their own."""
        return (self.axis, *self.folded)

    def has(self, modules: Sequence[str]) -> bool:
        """Return whether a unit of these modules is one of experts."""
        return any(name in self.modules for name in modules)

    def is_inside(self, module: str) -> bool:
        """Return whether a module runs on the rows that its experts get, of all ranks' tokens."""
        return any(name in self.modules for name in prefixes(module))

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        return self.axes
