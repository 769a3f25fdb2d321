"""Descend over the dials of a candidate: one of them changed at a time, exactly derived, as long as
that is better.

The list of dials is fixed: when gradients are reduced and gathered units given back, what is
gathered together, what moves beside computation and how far ahead, the size of a bucket, how blocks
keep activations, the micro-batch, and the schedule with its stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

from ptrain.axes.candidates import AxisChoice
from ptrain.axes.data.candidates import OVERLAPS, UNITS, is_left_out
from ptrain.selection.quantities import RESULTS
from ptrain.selection.search import Search
from ptrain.selection.space import Candidate, micro_batches, pipelines, through_of
from ptrain.spec.dials import STOCK_BUCKET_BYTES, GradientSync, Overlap, SyncPolicy

_BUCKETS = (STOCK_BUCKET_BYTES, 4 * STOCK_BUCKET_BYTES, 16 * STOCK_BUCKET_BYTES)
_SYNCS = tuple(
    SyncPolicy(gradients=when, reshard_after_forward=forward, reshard_after_backward=backward)
    for when in GradientSync
    for forward, backward in ((True, True), (False, True), (False, False))
)
_BESIDE = (*((overlap, None) for overlap in OVERLAPS), (Overlap.BACKWARD, 1), (Overlap.BACKWARD, 2))
Changes = tuple[tuple[str, Any], ...]


def neighbours(search: Search, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidates that differ in one dial that nobody wrote, and obey constraints."""
    task = search.task
    rules = [rule for rule in task.where.constraints if rule.name not in RESULTS]
    for other in _changed(search, candidate):
        spec = other.spec(task.placed)
        if not is_left_out(spec, task.written) and all(rule.holds(spec) for rule in rules):
            several, through = other.micro > 1, through_of(other.pipeline)
            legality = search.legality
            if legality.within(
                other.within, other.kept, through, several=several
            ) and legality.pipeline(other.pipeline, spec.batch.accumulate):
                yield other


def _changed(search: Search, candidate: Candidate) -> Iterator[Candidate]:
    task = search.task
    for changes in _dials(search, candidate.data):
        yield replace(candidate, data=replace(candidate.data, changes=changes))
    for kept in search.ways_to_keep:
        if kept != candidate.kept:
            yield replace(candidate, kept=kept)
    spec = candidate.spec(task.placed)
    sizes = [micro for micro, _ in micro_batches(task.base, spec.data_degree)]
    at = sizes.index(candidate.micro)
    for micro in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
        yield replace(candidate, micro=micro)
    ranks, left = candidate.pipeline.factors, task.devices
    for factor in (f for choice in candidate.within for f in choice.factors):
        left //= factor.degree
    for _, choices in pipelines(task.base, left, task.written) if ranks else ():
        for choice in choices:
            if choice.factors == ranks and choice.changes != candidate.pipeline.changes:
                yield replace(candidate, pipeline=choice)


def _dials(search: Search, choice: AxisChoice) -> Iterator[Changes]:
    """What the data axes may say instead, one dial at a time."""
    written, said = search.task.written, dict(choice.changes)
    bucket = said.get("bucket_bytes", search.task.base.bucket_bytes)
    offered: tuple[tuple[tuple[str, ...], Iterable[tuple[Any, ...]]], ...] = (
        (("sync",), ((written.value("sync", sync),) for sync in _SYNCS)),
        (("unit",), ((unit,) for unit in UNITS)),
        (("overlap", "prefetch"), _BESIDE),
        (("bucket_bytes",), ((size,) for size in _BUCKETS if size != bucket)),
    )
    for names, values in offered:
        free = [name == "sync" or not written.says(name) for name in names]
        for value in values if choice.factors else ():
            others = dict(compress(zip(names, value, strict=True), free))
            changes = tuple({**said, **others}.items())
            if changes != choice.changes:
                yield changes
