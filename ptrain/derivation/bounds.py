"""Bounds in place of sizes, for a model that selects by data: the same step derived at several
extents of what is selected, of which the least and the largest figure are taken, row by row. What
does not depend on the traces (Θ, Ω, G, traffic) is alike in all, and stays exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from ptrain.by_rank import ByRank, distinct, rows_by_rank
from ptrain.costs import Estimate, Footprint, Peak, State

RowT = TypeVar("RowT", Footprint, Peak)

_EXTENTS = (
    "the bounds are for one element of each selection and for all of them, each by itself, and "
    "hold if what is allocated grows with what is selected"
)
_OFF_DEVICE = attrgetter("state", "rank", "host_bytes", "file_bytes")
_PASSING = (State.ACTIVATIONS, State.TRANSIENT)


def bounded(estimate: Estimate, others: Sequence[Estimate], who: str) -> Estimate:
    """Return `estimate` with bounds of what differs in `others`, the same step at other extents;
    `who` selects by data. Where what is sent or leaves the device differs, nothing is said."""
    if any(_moved(other) != _moved(estimate) for other in others):
        why = f"{who}, and what it selects is moved off the device or sent again"
        undefined = dict.fromkeys(("activations", "peak", "traffic"), why)
        rows = tuple(row for row in estimate.memory if row.state not in _PASSING)
        return replace(estimate, memory=rows, peak=(), undefined=estimate.undefined | undefined)
    columns = (estimate, *others)
    return replace(
        estimate,
        memory=_between([column.memory for column in columns]),
        peak=_between([column.peak for column in columns]),
        by_data=dict.fromkeys(("activations", "peak"), f"{who}; {_EXTENTS}"),
    )


def _moved(estimate: Estimate) -> object:
    off_device = set(map(_OFF_DEVICE, distinct(estimate.memory)))
    return set(estimate.traffic), estimate.account_of, off_device


def _between(columns: Sequence[Sequence[RowT]]) -> Sequence[RowT]:
    """Return each rank's rows, which all columns have in the same order, with their bounds."""
    by_rank = [column for column in columns if isinstance(column, ByRank)]
    if len(by_rank) < len(columns):
        return [_bounds(rows) for rows in zip(*columns, strict=True)]
    ranks = range(max((len(kind_of) for _, kind_of in by_rank[0].parts), default=0))
    return rows_by_rank(
        (tuple(column.kinds_of(rank) for column in by_rank) for rank in ranks),
        lambda kinds: [
            _bounds(rows) for rows in zip(*map(ByRank.of_kinds, by_rank, kinds), strict=True)
        ],
    )


def _bounds(rows: Sequence[RowT]) -> RowT:
    sizes = [row.device_bytes for row in rows]
    lower = None if min(sizes) == max(sizes) else min(sizes)
    return replace(rows[0], device_bytes=max(sizes), lower_bytes=lower)
