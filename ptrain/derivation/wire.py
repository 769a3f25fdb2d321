"""What a backend puts on the wire for the bytes that the ring model predicts (Theorem 2).

The ring model says what a collective must move; a backend may move more. The factors of gloo
follow from its algorithms (torch 2.13): its reduce-scatter is executed as an all-reduce,
2 (N - 1) / N of the tensor in place of (N - 1) / N, but for that of gradients between two ranks,
who exchange halves (`rooms.comm`); every other call sends what the model says. A broadcast is a
tree: the root sends more than the others and some send nothing, so figures are means over the
ranks, which the model gives for a tree too, (N - 1) / N of the tensor.

Not in the prediction: gloo's headers, 48 bytes a message, which show in small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from ptrain.cost import Collective, Estimate, Phase, State, Traffic

# Sent by gloo / sent under the ring model; what is not named is 1.
GLOO = {Collective.REDUCE_SCATTER: Fraction(2)}
TOLERANCE = 0.001  # of a step whose tensors are larger than 1 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """Bytes that a rank sends over `axes` in a steady step, the mean over the ranks."""

    axes: tuple[str, ...]
    predicted_bytes: int
    measured_bytes: int
    factor: str


def wire_rows(exact: Estimate, measured: Estimate) -> tuple[WireRow, ...]:
    """A row for each set of axes that either side knows; none where nothing was measured."""
    if not measured.wire:
        return ()
    known = [row.axes for row in measured.wire] + [row.key.axes for row in _steady(exact.traffic)]
    return tuple(
        WireRow(
            axes=axes,
            predicted_bytes=predicted_bytes(exact, axes),
            measured_bytes=round(
                sum(row.sent_bytes for row in measured.wire if row.axes == axes)
                / measured.world_size
            ),
            factor=_factor(exact, axes),
        )
        for axes in dict.fromkeys(known)
    )


def predicted_bytes(exact: Estimate, axes: tuple[str, ...]) -> int:
    """Return the bytes that gloo sends over `axes`, mean over the ranks, rounded up."""
    kinds = exact.by_rank()
    rows = [row for rows in kinds for row in _steady(rows) if row.key.axes == axes]
    total = sum(row.sent_bytes * factor(row) for row in rows) / Fraction(len(kinds))
    return -int(-total // 1)


def factor(row: Traffic) -> Fraction:
    """Sent by gloo per byte of the ring model. A substitute (an exchange that stands for a
    reduce-scatter) is a collective of its own, and moves what the model says."""
    is_pair = 2 * row.sent_bytes <= row.payload_bytes + row.calls  # (N - 1) / N, rounded up
    if row.key.via or (is_pair and row.key.state is State.GRADIENTS):
        return Fraction(1)
    return GLOO.get(row.key.collective, Fraction(1))


def _steady(rows: Iterable[Traffic]) -> Iterator[Traffic]:
    """Calls between ranks (copies between tiers have no axes), those of every step."""
    return (row for row in rows if row.key.axes and row.key.phase is not Phase.SETUP)


def _factor(exact: Estimate, axes: tuple[str, ...]) -> str:
    """Return a text like `gloo: reduce_scatter 2, all others 1; mean over ranks`."""
    rows = [row for row in _steady(exact.traffic) if row.key.axes == axes]
    more = {str(row.key.collective): factor(row) for row in rows if factor(row) != 1}
    factors = [f"{name} {float(value):g}" for name, value in sorted(more.items())]
    trees = [tree for tree in rows if tree.key.collective is Collective.BROADCAST]
    factors += ["broadcast 1 (a tree: ranks differ)"] * bool(trees)
    others = "all others 1" if factors else "1"
    return f"gloo: {', '.join([*factors, others])}; mean over ranks"
