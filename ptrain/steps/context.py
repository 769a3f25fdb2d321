"""The step of the context axis."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.spec.axis import Axis
from ptrain.steps.kind import PlanStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel(PlanStep):
    """A is S or S* on `axis`: a rank has a slice of the tokens of every sample, and attention
    reaches those of the others. Theta, Omega and G are the wrap's, as on a data axis.

    `ulysses` neighbouring ranks exchange tokens for heads; `ring` such groups pass keys and values
    on (`ulysses * ring` is the degree). `is_balanced`: zigzag, each of the ring's places has an
    early and a late chunk; else slices are contiguous. `gathers`: A is S*, keys and values of the
    ring's places are gathered, in place of passed on. `sequence`: tokens of a sample.
    `has_documents`: samples are of several, and a mask says who attends to whom. Ranks draw the
    same random numbers, the masks of all tokens, of which each has its slice.
    """

    axis: Axis
    ulysses: int
    ring: int
    sequence: int
    is_balanced: bool = False
    gathers: bool = False
    has_documents: bool = False

    @property
    def chunks(self) -> int:
        """Of how many stretches a rank's tokens are, at most."""
        return 2 if self.is_balanced and self.ulysses % 2 else 1

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    @property
    def token_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)
