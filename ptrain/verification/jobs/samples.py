"""Which samples of the global batch the ranks' models saw, by content: the rows of their inputs
against the rows of the reference's. A batch that the loop rearranges (padding, pieces of sequences)
has other rows, and then nothing is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ptrain.verification.jobs.record import ForwardCall
from ptrain.verification.jobs.rows import rows_of_calls


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of the reference's inputs, from 0, that no rank saw, and that came more often than the
    others."""

    missing: tuple[int, ...]
    doubled: tuple[int, ...]
    count: int

    def __bool__(self) -> bool:
        return bool(self.missing or self.doubled)


def rows_of(calls: Sequence[ForwardCall]) -> list[str]:
    """Return a checksum of every row of the first tensor that the model was given, pass by pass."""
    return [row.key for row in rows_of_calls(calls)]


def ledger_of(reference: Sequence[str], everyones: Sequence[Sequence[str]]) -> Samples | None:
    """Ranks that share a batch all see it, so what counts is that no row comes more often than
    another. None where the rows cannot be compared."""
    expected = Counter(reference)
    seen = Counter(row for rows in everyones for row in rows)
    known = {row: seen[row] / times for row, times in expected.items() if seen[row]}
    if not known or set(seen) - set(expected):
        return None
    usual = Counter(known.values()).most_common(1)[0][0]
    return Samples(
        missing=tuple(i for i, row in enumerate(reference) if row not in known),
        doubled=tuple(i for i, row in enumerate(reference) if known.get(row, 0) > usual),
        count=len(reference),
    )
