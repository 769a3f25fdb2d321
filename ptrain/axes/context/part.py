"""What a rank of the context axis does in a layer's attention, as tables of allocations tell it:
by its kind, and by how many of the ring's places have tokens before its own and behind them.

Of a ring torch's template does the same at every hop but the first ones and the last: of more than
a few a table has no more to tell than of these (`traces.context_tables` looks further, and finds
none). Numbers of operators grow by as many with each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ptrain.axes.context.attention import spans_at
from ptrain.steps.step import ContextParallel

_TOLD_APART = 3  # hops
_ALIKE = 2  # hops from which on each more computes the same


class ContextKind(StrEnum):
    """The ways in which attention reaches the tokens of other ranks."""

    RING = "ring"
    ZIGZAG = "zigzag"
    GATHER = "gather"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"


EXCHANGING = (ContextKind.ULYSSES, ContextKind.HYBRID)  # tokens for heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """The rank at one of the ring's places. `before`: places whose tokens are before its own, or
    whose early chunks are; `behind`: the others. `ulysses` neighbours share its heads."""

    kind: ContextKind
    ulysses: int = 1
    before: int = 0
    behind: int = 0

    @property
    def name(self) -> str:
        """The name of what it allocates in a table."""
        if self.kind is ContextKind.GATHER:
            return self.place
        return "-".join(str(min(hops, _TOLD_APART)) for hops in (self.before, self.behind))

    @property
    def place(self) -> str:
        """The name of what it computes in a table."""
        if self.kind is ContextKind.GATHER:
            return "later" if self.before else "first"
        return "-".join(str(min(hops, _ALIKE)) for hops in (self.before, self.behind))

    @property
    def ring(self) -> int:
        """How many places there are."""
        return self.before + 1 + self.behind

    @property
    def halves(self) -> int:
        """Into how many chunks, equal ones, kernels take a rank's tokens."""
        return 2 if self.kind in (ContextKind.ZIGZAG, ContextKind.HYBRID) else 1

    def values(self, values: dict[str, int]) -> dict[str, int]:
        """Return the value of every symbol of a table, of those of a model on as many tokens."""
        own = {**values, "sequence": values["sequence"] // self.halves}
        if self.kind in EXCHANGING:
            own |= {"kv_heads": own["kv_heads"] // self.ulysses, "ulysses": self.ulysses}
        if self.kind is ContextKind.GATHER:
            own |= {"ring": self.ring, "before": self.before}
        return own


def kind_of(step: ContextParallel) -> ContextKind:
    """Return how a step reaches the tokens of others."""
    if step.gathers:
        return ContextKind.GATHER
    if step.ring == 1:
        return ContextKind.ULYSSES
    if step.ulysses > 1:
        return ContextKind.HYBRID
    return ContextKind.ZIGZAG if step.is_balanced else ContextKind.RING


def part_at(step: ContextParallel, index: int) -> ContextPart:
    """Return what the rank at this place along the axis does."""
    before = index // step.ulysses
    return ContextPart(
        kind=kind_of(step),
        ulysses=step.ulysses,
        before=before,
        behind=step.ring - 1 - before,
    )


def alike_by(step: ContextParallel, index: int) -> tuple[ContextPart, tuple[int, ...]]:
    """Return what ranks along the axis have in common that allocate and compute the same: what they
    do in attention, and how long the stretches are that their tokens are in."""
    lengths = tuple(behind - first for first, behind in spans_at(step, index))
    return part_at(step, index), lengths


def parts_told_apart(kind: ContextKind) -> Iterator[tuple[int, int]]:
    """Yield of each name that a table of a ring has the fewest places before and behind."""
    if kind is ContextKind.ULYSSES:
        yield 0, 0
        return
    for before in range(_TOLD_APART + 1):
        for behind in range(_TOLD_APART + 1):
            if before or behind:
                yield before, behind
