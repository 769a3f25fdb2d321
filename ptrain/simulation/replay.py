"""Many equal blocks by runs with few: a job of 80 layers is run with 4, 5 and 6 of them, and what
each of the others adds is what repeats in these three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

from ptrain.costs import Footprint, Operations, Peak, State, Traffic
from ptrain.meters.traffic import ring_bytes
from ptrain.simulation.repetition import repeated_calls, repeated_storages
from ptrain.simulation.stream import MemoryStream
from ptrain.spec.spec import Spec

Row = TypeVar("Row", Footprint, Operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one rank did in a steady step: what it called and what came and went. `before`: what it
    called in the step before it; `resident`: its bytes by state; `peaks`: the most by phase;
    `attention`: which kernels of it ran."""

    resident: tuple[Footprint, ...]
    peaks: tuple[Peak, ...]
    operations: Operations
    attention: tuple[str, ...]
    before: tuple[Traffic, ...]
    calls: tuple[Traffic, ...]
    stream: MemoryStream


def replayed(
    spec: Spec, runs: tuple[StepRecord, StepRecord, StepRecord], times: int
) -> StepRecord | None:
    """Return what a run with `times` blocks more than the first of these would do; None where the
    three do not differ by what repeats alone."""
    sent = partial(_sent, spec)
    resident = _grown([run.resident for run in runs], times)
    operations = _grown([(run.operations,) for run in runs], times)
    before = repeated_calls([run.before for run in runs], times, sent)
    calls = repeated_calls([run.calls for run in runs], times, sent)
    if resident is None or operations is None or before is None or calls is None:
        return None
    streams = [run.stream for run in runs]
    stream = repeated_storages(streams, times)
    if stream is None or len({course.fullest() for course in (stream, *streams)}) > 1:
        return None  # activations are read where most of them live: a maximum is no line
    (rank,) = {peak.rank for peak in runs[0].peaks}
    peaks = tuple(
        Peak(phase=phase, rank=rank, device_bytes=size) for phase, size in stream.peaks().items()
    )
    return StepRecord(
        resident=resident,
        peaks=peaks,
        operations=operations[0],
        attention=runs[0].attention,
        before=before,
        calls=calls,
        stream=stream,
    )


def _sent(spec: Spec, call: Traffic) -> int:
    degrees = {factor.axis.value: factor.degree for factor in spec.factors}
    if not call.key.axes or not degrees.keys() >= {*call.key.axes}:
        return 0  # a copy between tiers
    ranks = prod(degrees[axis] for axis in call.key.axes)
    return ring_bytes(call.key.collective, call.payload_bytes, ranks)


def _grown(rows: Sequence[Sequence[Row]], times: int) -> tuple[Row, ...] | None:
    """The rows of many blocks: each number as much larger for each block more as it is in the
    second and in the third; None where that is not the same."""
    if len({tuple(map(_name, of_run)) for of_run in rows}) > 1:
        return None
    grown = []
    for of_runs in zip(*rows, strict=True):
        first, second, third = map(_numbers, of_runs)
        more = {field: number - first[field] for field, number in second.items()}
        if any(third[field] - second[field] != step for field, step in more.items()):
            return None
        numbers: Any = {field: first[field] + times * step for field, step in more.items()}
        grown.append(replace(of_runs[0], **numbers))
    return tuple(grown)


def _name(row: Row) -> State | None:
    return row.state if isinstance(row, Footprint) else None


def _numbers(row: Row) -> dict[str, int]:
    names = (field.name for field in fields(row) if field.name != "rank")
    return {name: value for name in names if isinstance(value := getattr(row, name), int)}
