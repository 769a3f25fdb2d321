"""Which positions tokens were given: read off the rows of a table that has one for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ptrain.axes.context.draw import spans_text
from ptrain.axes.context.tokens import Span
from ptrain.verification.causes.scene import EXACT


def positions_text(rows: Tensor, table: Tensor, own: Sequence[Span]) -> str:
    """Return which positions' rows of `table` [S, ...] these are, in words, beside those that they
    should be; "" where some are no position's, or all are right."""
    table, rows = table.double().flatten(1), rows.double().flatten(1)
    distances = torch.cdist(rows, table)
    least, positions = distances.min(1)
    size = float(torch.linalg.vector_norm(table)) / len(table) ** 0.5
    spans = tuple(runs(positions.tolist()))
    if float(least.max()) > EXACT * size or spans == tuple(own):
        return ""
    return f"positions {spans_text(spans)} for {spans_text(own)}"


def runs(positions: Sequence[int]) -> Iterator[Span]:
    """Yield the spans that these are, one after the other."""
    first = 0
    for place in range(1, len(positions) + 1):
        if place == len(positions) or positions[place] != positions[place - 1] + 1:
            yield positions[first], positions[place - 1] + 1
            first = place
