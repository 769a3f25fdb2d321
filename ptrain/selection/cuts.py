"""What a search knows of a model that no table tells of: the facts of each cut that is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

import ptrain
from ptrain.errors import PtrainError
from ptrain.facts.cache import kept
from ptrain.facts.model import ModelFacts
from ptrain.facts.traced_part import traced_part
from ptrain.spec.spec import Spec

ReadFacts = Callable[[Spec], ModelFacts]


def read_or_kept(spec: Spec) -> ModelFacts:
    """Return the facts that the user's cache has, else those read off the model, which needs
    torch."""
    return kept(spec, partial(ptrain.read_facts, spec))


@dataclass
class TracedCuts:
    """The cuts of a model that were traced, `most` of them, for each takes seconds; a cut is what a
    trace depends on. `excess` is by how many bytes the last exact peak of a cut was above its
    estimate: blocks differ from those of the stand-in, and all candidates of a cut have the same
    blocks. `room`: the bytes that a peak may fill."""

    read: ReadFacts
    most: int
    room: float = inf
    cuts: dict[object, tuple[int, Spec]] = field(default_factory=dict)
    facts: dict[int, ModelFacts] = field(default_factory=dict)
    refusals: dict[int, PtrainError] = field(default_factory=dict)
    excess: dict[int, float] = field(default_factory=dict)

    def cut(self, spec: Spec) -> int:
        """Return the number of a spec's cut."""
        part = traced_part(spec)  # which cannot be hashed as a whole
        key = part.factors, part.batch, part.unit, part.pipeline, part.context, part.activations
        cut, first = self.cuts.setdefault(key, (len(self.cuts), part))
        assert part == first, "all that a trace depends on and candidates choose is in the key"
        return cut

    def of(self, spec: Spec) -> ModelFacts:
        """Return the facts of a spec's cut, which are read once. Raises PtrainError for what cannot
        be traced."""
        if (cut := self.cut(spec)) not in self.facts:
            self.facts[cut] = self.read(spec)
        return self.facts[cut]

    @property
    def least_excess(self) -> float:
        """Return how far estimates are below at least, of cuts that are not traced as of others."""
        return min(self.excess.values(), default=0.0)

    def may_be(self, peak: float) -> bool:
        """Return whether an estimated peak may fit, whatever the cut is."""
        return peak + self.least_excess <= self.room

    def may_fit(self, spec: Spec, peak: float) -> bool:
        """Return whether a candidate with this peak by its estimate is worth deriving: by what is
        known of cuts it fits, and its own is traced or may be."""
        cut = self.cut(spec)
        if cut in self.refusals:
            return False
        if cut not in self.facts and len(self.facts.keys() | self.refusals.keys()) >= self.most:
            return False
        return peak + self.excess.get(cut, self.least_excess) <= self.room

    def refuse(self, spec: Spec, error: PtrainError) -> None:
        """Remember why a cut cannot be derived."""
        self.refusals[self.cut(spec)] = error

    def compare(self, spec: Spec, peak: float, exact: int) -> None:
        """Remember how far an estimate was off."""
        self.excess[self.cut(spec)] = exact - peak

    def close(self) -> None:
        """Trace no other cut."""
        self.most = 0
