"""The record of a rank that ran out of memory, and its comparison with the prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ptrain.cost import Estimate, Phase, State
from ptrain.report.table import (
    MISSING,
    Importance,
    TableColumn,
    make_columns,
    memory_text,
    name_column,
    render_table,
)
from ptrain.units import parse_bytes

# Messages of CUDA's and the CPU's allocators, and of Python.
_MESSAGE = re.compile(r"out of memory|can't allocate memory|not enough memory|MemoryError")
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]i?B)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The state of a rank when an allocation failed.

    Attributes:
        rank: The rank.
        time: The time, in seconds since 1970.
        message: The first line of the exception.
        requested_bytes: The size of the allocation; None if the message does not name it.
        activity: `training`, `building the model`, `loading the checkpoint`, …
        step: The step, from 1; None outside of a step.
        phase: The phase of the step; None outside of a step.
        micro_batch: The micro-batch of forward or backward, from 1; None outside of them.
        module: The module that ran, `""` if unknown.
        live_bytes: The live bytes on the device by state, without states of unknown size.
        reserved_bytes: The bytes that CUDA's allocator reserved; None on CPUs.
        free_bytes: The bytes of the device that no process used; None on CPUs.
    """

    rank: int
    time: float
    message: str
    requested_bytes: int | None = None
    activity: str = "training"
    step: int | None = None
    phase: Phase | None = None
    micro_batch: int | None = None
    module: str = ""
    live_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    free_bytes: int | None = None


def is_out_of_memory(message: str) -> bool:
    """Return True if an error message reports that an allocation failed."""
    return bool(_MESSAGE.search(message))


def parse_request(message: str) -> int | None:
    """Return the bytes that an allocator's message names as requested, None if it names none."""
    if not (request := _REQUEST.search(message)):
        return None
    number, unit = request.groups()
    return parse_bytes(f"{number}{'B' if unit == 'bytes' else unit}")


def failure_headline(failure: OutOfMemory) -> str:
    """Return the sentence that names the rank, phase, micro-batch, module and step."""
    where = [f"while {failure.activity}"]
    if failure.phase is not None:
        where = [f"in the {failure.phase} pass"]
        if failure.phase is Phase.UPDATE:
            where = ["in the update"]
        elif failure.micro_batch is not None:
            where[0] += f" of micro-batch {failure.micro_batch}"
        if failure.module:
            where.append(f"in {failure.module}")
        where.append(f"in step {failure.step}")
    elif failure.module:
        where.append(f"in {failure.module}")
    return f"Rank {failure.rank} ran out of memory {', '.join(where)}."


def request_line(failure: OutOfMemory) -> str:
    """Return a line with the failed allocation and the free memory, "" if neither is known."""
    parts = []
    if failure.requested_bytes is not None:
        parts.append(f"It requested {memory_text(failure.requested_bytes)}")
    if failure.free_bytes is not None:
        parts.append(f"{memory_text(failure.free_bytes)} of the device were free")
    return f"{'; '.join(parts)}." if parts else ""


def fragmentation_line(failure: OutOfMemory) -> str:
    """Return advice if CUDA's allocator had reserved enough unused memory; else ""."""
    unused = (failure.reserved_bytes or 0) - sum(failure.live_bytes.values())
    if failure.requested_bytes is None or unused < failure.requested_bytes:
        return ""
    return (
        f"The allocator held {memory_text(unused)} unused in other blocks (fragmentation). Set "
        "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."
    )


def live_table(failure: OutOfMemory, exact: Estimate) -> str:
    """Return the live bytes of each state with the prediction for the rank.

    Args:
        failure: The record of the rank.
        exact: The prediction of the spec.
    """
    predicted = {row.state: row.device_bytes for row in exact.memory if row.rank == failure.rank}
    states = [state for state in State if state in failure.live_bytes or predicted.get(state)]
    rows = [(state, failure.live_bytes.get(state), predicted.get(state, 0)) for state in states]
    cells = [
        (str(state), MISSING if live is None else memory_text(live), memory_text(expected))
        for state, live, expected in rows
    ]
    peak = max(
        (
            row.device_bytes
            for row in exact.peak
            if row.rank == failure.rank and failure.phase in (None, row.phase)
        ),
        default=None,
    )
    if peak is not None:
        complete = State.ACTIVATIONS in failure.live_bytes
        total = memory_text(sum(failure.live_bytes.values())) if complete else MISSING
        label = "all together" if failure.phase is None else f"all in {failure.phase}"
        cells.append((label, total, memory_text(peak)))
    return render_table(
        make_columns(
            cells,
            name_column("memory of the rank"),
            TableColumn("live", Importance.RESULT),
            TableColumn("predicted"),
        )
    )
