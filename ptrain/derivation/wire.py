"""Bytes that a backend sends for the bytes that the ring model predicts (Theorem 2).

The ring model gives the bytes that a collective must move. A backend may send more. The factors of
gloo follow from its algorithms (torch 2.13). It executes a reduce-scatter as an all-reduce, which
sends 2 (N - 1) / N of the tensor instead of (N - 1) / N. An exception is the reduce-scatter of
gradients between two ranks, which exchange halves (`runtime.comm`). All other calls send the bytes
of the model. A broadcast is a tree in which ranks send different amounts, so figures are means over
the ranks. The mean of a tree, (N - 1) / N of the tensor, equals the model's.

gloo's headers, 48 bytes for each message, are not predicted. They are visible for small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from ptrain.cost import Collective, Estimate, Phase, State, Traffic

# Ratio of the bytes that gloo sends to the ring model's. The default is 1.
# ProcessGroupGloo.cpp runs a reduce-scatter as an all-reduce, of which each rank keeps its part.
GLOO = {Collective.REDUCE_SCATTER: Fraction(2)}
# The headers, 48 bytes for each message, are less than 0.1 % of messages of 1 MiB.
TOLERANCE = 0.001  # relative, for steps whose tensors are larger than 1 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """The bytes that a rank sends over `axes` in a steady step, as the mean over the ranks."""

    axes: tuple[str, ...]
    predicted_bytes: int
    measured_bytes: int
    factor: str


def wire_rows(exact: Estimate, measured: Estimate) -> tuple[WireRow, ...]:
    """Return a row for each set of axes that was predicted or measured. Empty without a
    measurement."""
    if not measured.wire:
        return ()
    known = [row.axes for row in measured.wire] + [
        row.key.axes for row in _steady_rows(exact.traffic)
    ]
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
    """Return the bytes that gloo sends over `axes`: the mean over ranks, rounded up."""
    kinds = exact.by_rank()
    rows = [row for rows in kinds for row in _steady_rows(rows) if row.key.axes == axes]
    total = sum(row.sent_bytes * gloo_factor(row) for row in rows) / Fraction(len(kinds))
    return -int(-total // 1)


def gloo_factor(row: Traffic) -> Fraction:
    """Return the bytes that gloo sends per byte of the ring model.

    A substitute, such as an exchange in place of a reduce-scatter, sends the bytes of the model.
    """
    # A row has no number of ranks. Only two ranks send half of the tensor or less, each call
    # rounded up.
    is_pair = 2 * row.sent_bytes <= row.payload_bytes + row.calls  # (N - 1) / N, rounded up
    if row.key.via or (is_pair and row.key.state is State.GRADIENTS):
        return Fraction(1)
    return GLOO.get(row.key.collective, Fraction(1))


def _steady_rows(rows: Iterable[Traffic]) -> Iterator[Traffic]:
    """Yield the calls between ranks of every step. Copies between tiers have no axes."""
    return (row for row in rows if row.key.axes and row.key.phase is not Phase.SETUP)


def _factor(exact: Estimate, axes: tuple[str, ...]) -> str:
    """Return a text like `gloo: reduce_scatter 2, all others 1; mean over ranks`."""
    rows = [row for row in _steady_rows(exact.traffic) if row.key.axes == axes]
    more = {str(row.key.collective): gloo_factor(row) for row in rows if gloo_factor(row) != 1}
    factors = [f"{name} {float(value):g}" for name, value in sorted(more.items())]
    trees = [tree for tree in rows if tree.key.collective is Collective.BROADCAST]
    factors += ["broadcast 1 (a tree: ranks differ)"] * bool(trees)
    others = "all others 1" if factors else "1"
    return f"gloo: {', '.join([*factors, others])}; mean over ranks"
